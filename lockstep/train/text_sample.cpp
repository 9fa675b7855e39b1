// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/text_sample.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/philox.h"
#include "lockstep/layout/shard_math.h"

namespace lockstep::train {
namespace {

constexpr double kTemperature = 0.8;
constexpr int64_t kRowMultiple = 64;  // tokens

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

std::string sample_text(TrainedModel& model, const config::TrainConfig& config,
                        const data::Tokenizer& tokenizer, c10::Device device,
                        const comm::Group& world) {
  const int64_t length = config.train.seq_len;
  std::vector<int32_t> text = tokenizer.encode(config.metrics.sample_prompt);
  if (text.empty()) text.push_back(0);
  const auto prompt = static_cast<int64_t>(text.size());
  const comm::Group tensor = model.pipeline().tensor().group();
  const layout::Range columns =
      layout::balanced_range(config.model.vocab, tensor.size(), tensor.rank());
  for (int64_t drawn = 0; drawn < config.metrics.sample_tokens; ++drawn) {
    const auto size = static_cast<int64_t>(text.size());
    const int64_t first =
        size <= length ? 0 : (size - length + length / 2 - 1) / (length / 2) * (length / 2);
    // What is behind the last token of a causal model does not matter: a row is no longer than its
    // text, but for a multiple that tensor-parallel ranks can share.
    const int64_t multiple = round_up(kRowMultiple, tensor.size());
    const at::Tensor input =
        at::zeros({1, std::min(length, round_up(size - first, multiple))}, at::kLong);
    for (int64_t i = first; i < size; ++i)
      input.data_ptr<int64_t>()[i - first] = text[static_cast<size_t>(i)];
    const at::Tensor logits = model.logits(input.to(device), size - first - 1);
    // The greatest of logits with noise of the right kind is a draw from their distribution
    // (Gumbel): each rank looks at its columns alone.
    double best[2] = {-std::numeric_limits<double>::infinity(), 0};
    const RandomKey key =
        random_key(static_cast<uint64_t>(config.train.seed), "sample", "", {.step = drawn});
    for (int64_t i = 0; i < logits.numel(); ++i) {
      const int64_t token = columns.begin + i;
      if (token >= tokenizer.vocab_size()) break;
      const double noise =
          -std::log(-std::log(std::max(1e-9, double{uniform(key, static_cast<uint64_t>(token))})));
      const double score = logits.data_ptr<float>()[i] / kTemperature + noise;
      if (score > best[0]) {
        best[0] = score;
        best[1] = static_cast<double>(token);
      }
    }
    const at::Tensor mine = at::empty({2}, at::kDouble),
                     all = at::empty({world.size(), 2}, at::kDouble);
    std::copy_n(best, 2, mine.data_ptr<double>());
    comm::all_gather(all, mine, world, {.tag = "sample"}).wait();
    // Replicas of the model may differ in the last bits: the first ranks of all decide.
    int winner = 0;
    for (int rank = 1; rank < world.size(); ++rank) {
      if (all[rank][0].item<double>() > all[winner][0].item<double>()) winner = rank;
    }
    text.push_back(static_cast<int32_t>(all[winner][1].item<double>()));
  }
  return tokenizer.decode(std::span(text).subspan(static_cast<size_t>(prompt)));
}

}  // namespace lockstep::train
