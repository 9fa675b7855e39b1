// SPDX-License-Identifier: Apache-2.0
// A training step of DataParallel with several replicas on one device, in turn with the same step
// without replicas. (torch::nn::parallel::data_parallel needs a device for each replica, and is not
// compared.)
//
//   bench_data_parallel [cpu|cuda] [REPLICAS WIDTH LAYERS ROWS ROUNDS]
#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/lockstep.h"

using namespace lockstep;

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl(int64_t width, int64_t layers) : width(width), layers(layers) { reset(); }
  void reset() override {
    linear.clear();  // a clone has those of its original
    for (int64_t i = 0; i < layers; ++i) {
      linear.push_back(
          register_module("linear" + std::to_string(i), torch::nn::Linear(width, width)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& each : linear) x = x + at::gelu(each(x));
    return x;
  }
  int64_t width, layers;
  std::vector<torch::nn::Linear> linear;
};
TORCH_MODULE(Net);

int main(int argc, char** argv) {
  const bool cuda = argc > 1 && std::string(argv[1]) == "cuda";
  const auto given = [&](int i, int64_t standard) {
    return i < argc ? std::atoll(argv[i]) : standard;
  };
  const int64_t replicas = given(2, 2), width = given(3, cuda ? 4096 : 512), layers = given(4, 8);
  const int64_t rows = given(5, cuda ? 16384 : 1024), rounds = given(6, 20);
  const c10::Device device(cuda ? at::kCUDA : at::kCPU, cuda ? 0 : -1);
  const std::vector<c10::Device> devices(static_cast<size_t>(replicas), device);
  const at::Tensor input = at::randn({rows, width}, device),
                   target = at::randn({rows, width}, device);

  struct Way {
    const char* name;
    Net net;
    std::function<at::Tensor(Net&)> forward;
    std::function<void()> sync = [] {};
    double best_ms = 1e9, loss = 0;
  };
  const auto make = [&] {
    torch::manual_seed(1);
    Net net(width, layers);
    net->to(device);
    return net;
  };
  std::vector<Way> ways;
  ways.push_back({"one replica", make(), [&](Net& net) { return net->forward(input); }});
  Net shared = make();
  auto parallel = parallel::data_parallel(shared, {.devices = devices});
  ways.push_back({"lockstep", shared, [&](Net&) { return parallel.forward(input); },
                  [&] { parallel.sync_gradients(); }});
  for (int64_t round = 0; round < rounds; ++round) {
    for (Way& way : ways) {
      torch::optim::SGD optimizer(way.net->parameters(), 1e-3);
      const auto begin = std::chrono::steady_clock::now();
      const at::Tensor loss = at::mse_loss(way.forward(way.net), target);
      loss.backward();
      way.sync();
      optimizer.step();
      way.loss = loss.item<double>();  // waits for the device
      if (cuda) way.net->parameters()[0].sum().item<double>();
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - begin;
      way.best_ms = std::min(way.best_ms, took.count());
      way.net->zero_grad();
    }
  }
  std::printf("%lld replicas on %s, width %lld, %lld layers, %lld rows\n", (long long)replicas,
              device.str().c_str(), (long long)width, (long long)layers, (long long)rows);
  for (const Way& way : ways) {
    std::printf("%-12s %8.2f ms  %5.3f of one replica  loss %.6f\n", way.name, way.best_ms,
                way.best_ms / ways[0].best_ms, way.loss);
  }
}
