// SPDX-License-Identifier: Apache-2.0
// A program of one process. docs/porting.md turns it into after.cpp, in five steps.
#include <torch/torch.h>

#include <cstdio>

struct Points : torch::data::datasets::Dataset<Points> {
  explicit Points(int64_t count) : x(torch::rand({count, 8})), y(x.norm(2, 1, true)) {}
  torch::data::Example<> get(size_t index) override {
    const auto row = static_cast<int64_t>(index);
    return {x[row], y[row]};
  }
  torch::optional<size_t> size() const override { return x.size(0); }

  torch::Tensor x, y;  // points, and how far they are from the origin
};

int main() {
  torch::manual_seed(0);
  const Points train(1024), test(250);
  torch::nn::Sequential model(torch::nn::Linear(8, 128), torch::nn::GELU(),
                              torch::nn::Linear(128, 128), torch::nn::GELU(),
                              torch::nn::Linear(128, 1));

  auto examples = Points(train).map(torch::data::transforms::Stack<>());
  torch::data::samplers::RandomSampler sampler(1024);
  auto loader = torch::data::make_data_loader(std::move(examples), sampler, 64);

  torch::optim::AdamW optimizer(model->parameters(), 1e-3);

  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    double sum = 0;
    for (auto& batch : *loader) {
      const torch::Tensor loss = torch::mse_loss(model->forward(batch.data), batch.target);
      optimizer.zero_grad();
      loss.backward();
      torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5);
      optimizer.step();
      sum += loss.item<double>();
    }
    torch::save(model, "model.pt");

    const torch::NoGradGuard no_grad;
    double error = torch::mse_loss(model->forward(test.x), test.y).item<double>();
    std::printf("epoch %d: loss %.6f, test %.6f\n", int(epoch), sum / 16, error);
  }
}
