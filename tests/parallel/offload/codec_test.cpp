// SPDX-License-Identifier: Apache-2.0
// Optimizer state that is kept in fewer bytes: the same bits where nothing is lost, and nearly the
// same loss where something is.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "tests/parallel/offload/training.h"

namespace lockstep::test {
namespace {

using layout::OffloadOptions;
using layout::OffloadStrategy;
using layout::UpdateSite;

OffloadOptions kept_as(const char* codecs, UpdateSite site) {
  return {.param_budget = 512 * kKiB,
          .host_budget = 64 * kMiB,
          .device_limit = kMiB,
          .codec = layout::parse_state_codecs(codecs),
          .advanced = {
              .host_limit = 64 * kMiB, .strategy = OffloadStrategy::extreme, .update_site = site}};
}

TEST(OffloadCodec, LosslessHasTheSameBits) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const OffloadRun run{.layers = 4, .width = 112, .dtype = dtype};
    for (const int ranks : {1, 2}) {
      comm::run_threads(ranks, [&](const comm::Group& group) {
        const OffloadCurve plain = train_offloaded(group, run, {});
        for (const char* codecs : {"lossless", "exp_avg=lossless"}) {
          const OffloadCurve moved = train_offloaded(group, run, kept_as(codecs, UpdateSite::cpu));
          ASSERT_EQ(plain.losses, moved.losses) << codecs;
          EXPECT_TRUE(plain == moved) << codecs;
          EXPECT_GT(moved.stats.state_on_host, 0);
        }
      });
    }
  }
}

// ---- a small language model ----

constexpr TransformerOptions kGpt{
    .vocabulary = 64, .width = 64, .heads = 2, .blocks = 2, .length = 32};
constexpr int kSteps = 500, kLast = 20;

// Some period that has to be found out, a function of the step.
Batch text_of(int step) {
  const at::Tensor row = at::arange(2, at::kLong).view({2, 1}) + 2 * step;
  const at::Tensor place = at::arange(kGpt.length + 1, at::kLong);
  const at::Tensor stride = 1 + row.remainder(5), noise = (row * row + place * 7).remainder(11);
  const at::Tensor tokens =
      (row * 13 + stride * place + noise.div(10, "floor")).remainder(kGpt.vocabulary);
  return {tokens.narrow(1, 0, kGpt.length), tokens.narrow(1, 1, kGpt.length)};
}

struct Learned {
  double first = 0, last = 0;  // means of losses
  int64_t state = 0;           // bytes
  std::vector<double> losses = {};
};

Learned learn(std::optional<OffloadOptions> offload) {
  TinyTransformer model(kGpt);
  fill_parameters(*model, 7);
  auto sharded = parallel::fully_shard(
      *model, comm::Group{},
      {.units = parallel::ByType{{"TransformerBlock"}},
       .use_orig_params = true,
       .offload = offload ? parallel::Offload(*offload) : parallel::NoOffload{}});
  const optim::AdamWOptions adamw{.lr = 1e-3, .weight_decay = 0.1};
  std::unique_ptr<optim::Optimizer> optimizer;
  if (offload) {
    optimizer = std::make_unique<parallel::OffloadedAdamW>(sharded, adamw);
  } else {
    optimizer = std::make_unique<optim::AdamW>(sharded.named_parameters(), adamw);
  }
  Learned learned;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = text_of(step);
    const at::Tensor loss = TransformerTask::loss(model->forward(batch.input), batch);
    loss.backward();
    sharded.clip_grad_norm_(1);
    optimizer->step();
    optimizer->zero_grad();
    learned.losses.push_back(loss.item<double>());
  }
  const auto mean = [](auto begin, auto end) {
    return std::accumulate(begin, end, 0.0) / static_cast<double>(end - begin);
  };
  learned.first = mean(learned.losses.begin(), learned.losses.begin() + kLast);
  learned.last = mean(learned.losses.end() - kLast, learned.losses.end());
  const parallel::OffloadStats stats = parallel::offload_stats(sharded);
  learned.state = stats.state_on_device + stats.state_on_host;
  return learned;
}

TEST(OffloadCodec, LossyStateLearnsAsMuch) {
  const std::vector<std::string> codecs{"none", "bf16", "fp16", "quantization"};
  std::vector<Learned> learned(codecs.size());
  // Models of their own, side by side.
  comm::run_threads(static_cast<int>(codecs.size()), [&](const comm::Group& group) {
    const auto i = static_cast<size_t>(group.rank());
    if (i == 0) {
      learned[i] = learn({});
      return;
    }
    // State alone moves: the rest has no part in this.
    OffloadOptions offload = kept_as(codecs[i].c_str(), UpdateSite::cpu);
    offload.params = offload.grads = false;
    offload.device_limit = 2 * kMiB;
    learned[i] = learn(offload);
  });
  const Learned& plain = learned[0];
  EXPECT_LT(plain.last, 0.5 * plain.first);
  for (size_t i = 1; i < codecs.size(); ++i) {
    EXPECT_NEAR(learned[i].last, plain.last, 0.01 * plain.last) << codecs[i];
    EXPECT_NE(learned[i].losses, plain.losses) << codecs[i];  // something is lost
  }
  // And something is gained by that: 2 bytes for 4; 1 where the tensor is large.
  EXPECT_EQ(learned[1].state, learned[2].state);
  EXPECT_LT(learned[3].state, 0.7 * static_cast<double>(learned[1].state));
}

}  // namespace
}  // namespace lockstep::test
