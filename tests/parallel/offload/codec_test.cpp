// SPDX-License-Identifier: Apache-2.0
// Parameters, gradients and optimizer state that are kept in fewer bytes: the same bits where
// nothing is lost, and nearly the same loss where something is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "tests/parallel/offload/training.h"

namespace lockstep::test {
namespace {

using layout::OffloadOptions;
using layout::UpdateSite;

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

// ---- parameters and gradients ----

TEST(OffloadCodec, LosslessParametersHaveTheSameBits) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool use_orig_params : {true, false}) {
      const OffloadRun run{.dtype = dtype, .clip = 0, .use_orig_params = use_orig_params};
      const OffloadCurve plain = train_offloaded({}, run, {});
      const OffloadCurve moved =
          train_offloaded({}, run, kept_as("lossless,params=lossless", UpdateSite::cpu));
      ASSERT_EQ(plain.losses, moved.losses);
      EXPECT_TRUE(plain == moved);
      EXPECT_GT(moved.stats.params_kept.plain, 0);
      EXPECT_LT(moved.stats.params_kept.ratio(), 1.01);  // what does not shrink is kept as it is
      EXPECT_LT(moved.stats.state_kept.ratio(), 1.01);
      EXPECT_NE(moved.stats.state_kept.ratio(), 1);
    }
  }
}

// What docs/offload.md says of the loss: relative to the run without codecs, in every step.
struct Bound {
  const char* params;
  double loss, ratio;
};
constexpr Bound kBounds[] = {
    {"bf16", 0.005, 0.79}, {"int8", 0.01, 0.56}, {"quantization", 0.02, 0.56}};

TEST(OffloadCodec, CodedParametersAndGradientsTrainNearlyAsWell) {
  for (const int ranks : {1, 2}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const OffloadRun run{.layers = 4, .steps = 20, .dtype = dtype};
      comm::run_threads(ranks, [&](const comm::Group& group) {
        const OffloadCurve plain = train_offloaded(group, run, everything());
        for (const auto& [params, bound, ratio] : kBounds) {
          const std::string codecs = std::string("params=") + params + ",grads=bf16";
          const auto trained = [&](UpdateSite site) {
            return train_offloaded(group, run, kept_as(codecs.c_str(), site));
          };
          const OffloadCurve coded = trained(UpdateSite::cpu);
          EXPECT_NE(coded.losses, plain.losses) << codecs;  // something is lost
          for (size_t step = 0; step < plain.losses.size(); ++step) {
            EXPECT_NEAR(coded.losses[step], plain.losses[step], bound * plain.losses[step])
                << codecs << ", step " << step << ", " << ranks << " ranks";
          }
          EXPECT_LT(coded.losses.back(), 0.95 * coded.losses.front());
          // Both sites have the same bits.
          EXPECT_TRUE(coded == trained(UpdateSite::device)) << codecs;
          // And it is smaller: what was taken of the host's budget, not what was computed.
          EXPECT_LT(coded.stats.params_kept.ratio(), ratio) << codecs;
          EXPECT_EQ(coded.stats.grads_kept.ratio(), dtype == at::kFloat ? 0.5 : 1.0);
          const double saved = static_cast<double>(plain.stats.host_bytes - coded.stats.host_bytes);
          const double elements = 4. * 112 * 112 / ranks;
          EXPECT_GT(saved / elements, (1 - ratio) * 4 - 0.3 + (dtype == at::kFloat ? 2 : 0))
              << codecs << ": bytes of a parameter";
        }
      });
    }
  }
}

// What all ranks gather, and what each computes with, is the same.
TEST(OffloadCodec, CodedParametersAreTheSameOnEveryRank) {
  for (const char* codecs : {"params=bf16", "params=int8", "params=quantization"}) {
    for (const bool use_orig_params : {true, false}) {
      comm::run_threads(3, [&](const comm::Group& group) {
        Tower model(2, 120);
        fill_parameters(*model, 3);
        OffloadOptions offload = kept_as(codecs, UpdateSite::cpu);
        offload.device_limit = 320 * kKiB;
        offload.param_budget = 256 * kKiB;
        auto sharded = parallel::fully_shard(*model, group,
                                             {.units = parallel::ByType{{"Layer"}},
                                              .min_num_params = 100,
                                              .use_orig_params = use_orig_params,
                                              .offload = offload});
        parallel::OffloadedAdamW optimizer(sharded, {.lr = 1e-2});
        for (int step = 0; step < 2; ++step) {
          model->forward(at::ones({2, 120}) * (1 + group.rank())).square().mean().backward();
          optimizer.step();
          optimizer.zero_grad();
        }
        EXPECT_LT(parallel::offload_stats(sharded).params_kept.ratio(), 0.8);
        const auto whole = sharded.full_state_dict();
        const auto summon = sharded.summon();
        for (const auto& item : model->named_parameters()) {
          const at::Tensor mine = item.value().detach().clone();
          at::Tensor all = at::empty({3, mine.numel()});
          comm::all_gather(all, mine.view({1, -1}), group).wait();
          EXPECT_TRUE(all[0].equal(all[1]) && all[0].equal(all[2])) << codecs << item.key();
          for (const auto& [name, master] : whole) {
            if (name != item.key()) continue;
            // The master is within half a step of what its codes are.
            EXPECT_LT((master - mine).abs().max().item<double>(),
                      0.0075 * master.abs().max().item<double>())
                << codecs << " " << name;
          }
        }
      });
    }
  }
}

// Whatever is written between steps is what is computed with next, and what is saved.
TEST(OffloadCodec, WritesReachCodedParameters) {
  for (const char* codecs :
       {"params=bf16", "params=int8", "params=quantization", "params=lossless"}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      Tower model(2, 72);
      fill_parameters(*model, 3);
      model->to(dtype);
      OffloadOptions offload = kept_as(codecs, UpdateSite::cpu);
      offload.device_limit = offload.param_budget = 256 * kKiB;
      auto sharded = parallel::fully_shard(
          *model, comm::Group{},
          {.units = parallel::ByType{{"Layer"}}, .use_orig_params = true, .offload = offload});
      EXPECT_NE(parallel::offload_stats(sharded).params_kept.ratio(), 1) << codecs;
      parallel::OffloadedAdamW optimizer(sharded, {.lr = 1e-2});
      const at::Tensor input = at::ones({2, 72});
      const auto step = [&] {
        model->forward(input).square().mean().backward();
        optimizer.step();
        optimizer.zero_grad();
      };
      const auto now = [&] {
        const at::NoGradGuard no_grad;
        return model->forward(input).sum().item<double>();
      };
      const auto expect_near = [&](double value, const char* what) {
        EXPECT_NEAR(now(), value, 0.02 * std::abs(value) + 1e-4) << codecs << ": " << what;
      };
      const auto begin = sharded.full_state_dict();
      const double first = now();
      for (int i = 0; i < 3; ++i) step();
      EXPECT_GT(std::abs(now() - first), 0.05 * std::abs(first)) << "the steps change something";
      sharded.load_full_state_dict(begin);
      expect_near(first, "load_full_state_dict");
      step();  // from what was loaded
      const double after_one = now();
      // By an operator on the shards, in the window, then a step in the same window: it begins from
      // what was written, and leaves alone what has no gradient.
      for (const bool has_gradients : {false, true}) {
        sharded.load_full_state_dict(begin);
        model->forward(input).square().mean().backward();
        {
          const at::NoGradGuard no_grad;
          for (at::Tensor& shard : sharded.parameters()) shard.mul_(0.5);
        }
        if (!has_gradients) optimizer.zero_grad();
        optimizer.step();
        optimizer.zero_grad();
        optimizer.wait();
        now();  // a use, after which all are as they rest
        for (const auto& [name, tensor] : sharded.full_state_dict()) {
          for (const auto& [loaded, whole] : begin) {
            if (loaded != name) continue;
            const at::Tensor half = whole.to(at::kFloat) * 0.5;
            const double largest = half.abs().max().item<double>();
            const double far = (half - tensor.to(at::kFloat)).abs().max().item<double>();
            const double rounding = largest * (dtype == at::kFloat ? 1e-4 : 0.005);
            EXPECT_LT(far, rounding + (has_gradients ? 0.03 : 0)) << codecs << " " << name;
            EXPECT_TRUE(!has_gradients || far > 0.002) << codecs << " " << name << " " << far;
          }
        }
      }
      const at::NoGradGuard no_grad;
      {
        const auto summon = sharded.summon({.write_back = true});
        for (const auto& item : model->named_parameters()) {
          for (const auto& [name, tensor] : begin) {
            if (name == item.key()) item.value().copy_(tensor);
          }
        }
      }
      expect_near(first, "summon");
      EXPECT_NE(after_one, first);
    }
  }
}

// Memory behind a parameter's values is there while someone reads them, not longer.
TEST(OffloadCodec, CodedParametersTakeTheirBytesOnly) {
  const auto bytes = [](const char* codecs) {
    const OffloadRun run{.layers = 8, .steps = 2};
    return train_offloaded({}, run, kept_as(codecs, UpdateSite::cpu)).stats;
  };
  const auto plain = bytes("none"), coded = bytes("params=int8,grads=bf16");
  // 12.5 kB of a layer's parameters would be 50: codes, scales and remainders are 25.5.
  EXPECT_LT(coded.params_on_host, 0.52 * plain.params_on_host);
  EXPECT_LT(coded.host_peak, plain.host_peak);
  EXPECT_EQ(coded.params_kept.bytes, coded.params_on_host);
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
