// SPDX-License-Identifier: Apache-2.0
// What `lockstep train` is made of, in one function: text, a small Llama, batches that are the same
// for any number of ranks, and a few words from the model at the end.
//
// $ lockstep run -n 2 build/bin/09_language_model
// [rank0]: one two three one two three one two three one two three

#include <fstream>
#include <iostream>
#include <string>

#include "lockstep/lockstep.h"

int main() {
  using namespace lockstep;
  const comm::Group group = comm::init();
  const std::string path = "counting" + std::to_string(group.rank()) + ".txt";
  {
    std::ofstream text(path);
    for (int i = 0; i < 500; ++i) text << "one two three ";
  }
  const auto tokenizer = data::Tokenizer::bytes();
  const auto corpus = data::Corpus::open(path, tokenizer);

  const auto spec =
      config::ModelSpec{
          .kind = config::ModelKind::llama, .layers = 2, .hidden = 64, .heads = 4, .kv_heads = 2}
          .resolved(/*seq_len=*/64, tokenizer.vocab_size());
  model::LanguageModel model(spec);
  model::initialize(*model, /*seed=*/1);
  auto ddp = parallel::ddp(*model, group);
  optim::AdamW optimizer(*model, {.lr = 3e-3});

  data::BatchReader reader(corpus, {.seq_len = 64,
                                    .micro_batch = 4,
                                    .dp = group.size(),
                                    .dp_rank = group.rank(),
                                    .vocab = spec.vocab});
  for (int step = 0; step < 60; ++step) {
    const data::Batch batch = reader.next();
    const at::Tensor input = torch::tensor(batch.input).view({batch.rows, 64});
    const at::Tensor logits = ddp.forward(input).flatten(0, 1);
    nn::cross_entropy(logits, torch::tensor(batch.target), {.scale = 1.0 / (4 * 64)}).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  if (group.rank() != 0) return 0;
  std::string text = "one ";
  const auto prompt = tokenizer.encode(text);
  model::generate(*model, {prompt.begin(), prompt.end()}, {.tokens = 51, .temperature = 0},
                  [&](int64_t token) {
                    text += static_cast<char>(token);
                    return true;
                  });
  std::cout << text << "\n";
}
