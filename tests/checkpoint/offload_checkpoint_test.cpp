// SPDX-License-Identifier: Apache-2.0
// Checkpoints do not know what is offloaded: what one saved, the other goes on from.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "lockstep/checkpoint/checkpoint.h"
#include "tests/parallel/offload/training.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using checkpoint::slices_of;
using layout::OffloadOptions;
using layout::OffloadStrategy;
using layout::UpdateSite;

constexpr int kStepSaved = 5, kStepEnd = 10;
constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;

OffloadOptions all_offloaded(UpdateSite site) {
  return {.param_budget = 64 * kKiB,
          .host_budget = 64 * kMiB,
          .device_limit = 320 * kKiB,
          .advanced = {
              .host_limit = 64 * kMiB, .strategy = OffloadStrategy::extreme, .update_site = site}};
}

struct TrainingSegment {
  std::optional<OffloadOptions> offload = std::nullopt;
  int begin = 0, end = kStepEnd;
  std::string load = {}, save = {};  // a checkpoint, and the folder for one
  bool used = false;                 // the model has been, before it is loaded
  at::ScalarType dtype = at::kBFloat16;
  std::optional<optim::SGDOptions> sgd = std::nullopt;
};

struct Curve {
  std::vector<double> losses = {}, norms = {};
  std::vector<at::Tensor> weights = {};
  std::string saved = {};
  int64_t decisions = 0;  // about places, after the first
};

Curve train(const comm::Group& group, const TrainingSegment& segment) {
  constexpr int64_t kWidth = 104;
  Tower model(4, kWidth);
  fill_parameters(*model, 3);
  model->to(segment.dtype);
  auto sharded = parallel::fully_shard(*model, group,
                                       {.units = parallel::ByType{{"Layer"}},
                                        .min_num_params = 50,
                                        .use_orig_params = true,
                                        .offload = offload_for(segment.offload, segment.sgd)});
  const auto optimizer = make_optimizer(sharded, segment.offload.has_value(), segment.sgd);
  Curve curve;
  const at::Tensor numbers = at::arange(6 * kWidth, at::kFloat).view({6, kWidth});
  const auto step = [&](int index) {
    const at::Tensor input = at::sin(numbers * (1 + 0.01 * (index * group.size() + group.rank())));
    const at::Tensor loss = (model->forward(input) - at::cos(numbers)).square().mean();
    loss.backward();
    curve.losses.push_back(loss.item<double>());
    curve.norms.push_back(sharded.clip_grad_norm_(0.05));
    optimizer->step();
    optimizer->zero_grad();
  };
  if (segment.used) {
    for (int index = 0; index < 2; ++index) step(100 + index);
    curve = {};
  }
  const auto slices = checkpoint::state(sharded, *optimizer);
  if (!segment.load.empty()) {
    EXPECT_EQ(checkpoint::load(segment.load, slices, group).step, segment.begin);
  }
  for (int index = segment.begin; index < segment.end; ++index) step(index);
  if (!segment.save.empty())
    curve.saved = checkpoint::save(segment.save, {.step = segment.end, .slices = slices}, group);
  for (const auto& [name, tensor] : sharded.full_state_dict()) curve.weights.push_back(tensor);
  curve.decisions = parallel::offload_stats(sharded).decisions;
  return curve;
}

void expect_tail(const Curve& whole, const Curve& tail, const std::string& what) {
  SCOPED_TRACE(what);
  EXPECT_EQ(std::vector(whole.losses.begin() + kStepSaved, whole.losses.end()), tail.losses);
  EXPECT_EQ(std::vector(whole.norms.begin() + kStepSaved, whole.norms.end()), tail.norms);
  ASSERT_EQ(whole.weights.size(), tail.weights.size());
  for (size_t i = 0; i < whole.weights.size(); ++i)
    EXPECT_TRUE(whole.weights[i].equal(tail.weights[i])) << i;
}

TEST(OffloadCheckpoint, ResumesWithTheSameBits) {
  const std::optional<OffloadOptions> forms[] = {std::nullopt, all_offloaded(UpdateSite::device),
                                                 all_offloaded(UpdateSite::cpu)};
  for (const int ranks : {1, 2}) {
    const TempDir folder;
    comm::run_threads(ranks, [&](const comm::Group& group) {
      const Curve whole = train(group, {});
      for (size_t from = 0; from < std::size(forms); ++from) {
        const Curve first = train(group, {.offload = forms[from],
                                          .end = kStepSaved,
                                          .save = folder.path() + "/" + std::to_string(from)});
        for (size_t to = 0; to < std::size(forms); ++to) {
          for (const bool used : {false, true}) {
            const Curve second = train(
                group,
                {.offload = forms[to], .begin = kStepSaved, .load = first.saved, .used = used});
            expect_tail(whole, second,
                        std::to_string(from) + " to " + std::to_string(to) +
                            (used ? ", used, " : ", ") + std::to_string(ranks) + " ranks");
          }
        }
      }
    });
  }
}

// Those of SGD, and of float16 and float64, which have another form.
TEST(OffloadCheckpoint, ResumesOtherRulesAndTypesWithTheSameBits) {
  OffloadOptions wide = all_offloaded(UpdateSite::device);
  wide.param_budget = 128 * kKiB;
  wide.device_limit = 640 * kKiB;
  OffloadOptions lossless = wide;
  lossless.advanced.update_site = UpdateSite::cpu;
  lossless.codec = layout::parse_state_codecs("exp_avg=lossless");
  struct Case {
    at::ScalarType dtype;
    std::optional<optim::SGDOptions> sgd;
    OffloadOptions offload;
  };
  const optim::SGDOptions momentum{.lr = 0.1, .momentum = 0.9, .dampening = 0.3};
  const optim::SGDOptions plain{.lr = 0.1, .weight_decay = 0.1};
  const Case cases[] = {
      {at::kFloat, momentum, all_offloaded(UpdateSite::device)},
      {at::kBFloat16, momentum, all_offloaded(UpdateSite::cpu)},
      {at::kDouble, momentum, lossless},
      {at::kHalf, plain, all_offloaded(UpdateSite::device)},
      {at::kFloat, plain, all_offloaded(UpdateSite::cpu)},
      {at::kHalf, std::nullopt, all_offloaded(UpdateSite::device)},
      {at::kDouble, std::nullopt, wide},
  };
  const TempDir folder;
  for (size_t i = 0; i < std::size(cases); ++i) {
    const auto& [dtype, sgd, offload] = cases[i];
    const std::optional<OffloadOptions> forms[] = {std::nullopt, offload};
    comm::run_threads(2, [&](const comm::Group& group) {
      const Curve whole = train(group, {.dtype = dtype, .sgd = sgd});
      for (size_t from = 0; from < 2; ++from) {
        const Curve first =
            train(group, {.offload = forms[from],
                          .end = kStepSaved,
                          .save = folder.path() + "/" + std::to_string(2 * i + from),
                          .dtype = dtype,
                          .sgd = sgd});
        const Curve second = train(group, {.offload = forms[1 - from],
                                           .begin = kStepSaved,
                                           .load = first.saved,
                                           .used = true,
                                           .dtype = dtype,
                                           .sgd = sgd});
        expect_tail(whole, second, std::to_string(i) + " from " + std::to_string(from));
      }
    });
  }
}

// A checkpoint has the master of coded parameters, so that runs with other codecs, and without, go
// on from it; one that has the same codec goes on as if nothing had happened.
TEST(OffloadCheckpoint, ResumesWithAndWithoutCodecs) {
  const auto coded = [](const char* codecs) {
    OffloadOptions options = all_offloaded(UpdateSite::cpu);
    options.codec = layout::parse_state_codecs(codecs);
    return options;
  };
  const std::optional<OffloadOptions> forms[] = {
      std::nullopt, coded("params=bf16"), coded("params=int8"), coded("params=quantization")};
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    for (const int ranks : {1, 2}) {
      const TempDir folder;
      comm::run_threads(ranks, [&](const comm::Group& group) {
        for (size_t from = 0; from < std::size(forms); ++from) {
          const Curve whole = train(group, {.offload = forms[from], .dtype = dtype});
          const Curve first = train(group, {.offload = forms[from],
                                            .end = kStepSaved,
                                            .save = folder.path() + "/" + std::to_string(from),
                                            .dtype = dtype});
          for (size_t to = 0; to < std::size(forms); ++to) {
            const Curve second = train(group, {.offload = forms[to],
                                               .begin = kStepSaved,
                                               .load = first.saved,
                                               .used = true,
                                               .dtype = dtype});
            const std::string what = std::to_string(from) + " to " + std::to_string(to) + ", " +
                                     std::to_string(ranks) + " ranks";
            if (from == to && from != 3) expect_tail(whole, second, what);
            for (size_t i = 0; i < second.losses.size(); ++i) {
              const double loss = whole.losses[kStepSaved + i];
              EXPECT_NEAR(second.losses[i], loss, 0.02 * loss) << what;
            }
          }
        }
      });
    }
  }
}

// State that activations have driven from the device is in the checkpoint like any other.
TEST(OffloadCheckpoint, ResumesAfterPlacesWereDecidedAgain) {
  const OffloadOptions pressed{.param_budget = 512 * kKiB,
                               .host_budget = 64 * kMiB,
                               .device_limit = kMiB,
                               .advanced = {.host_limit = 64 * kMiB,
                                            .strategy = OffloadStrategy::conservative,
                                            .update_site = UpdateSite::device}};
  for (const int ranks : {1, 2}) {
    const TempDir folder;
    comm::run_threads(ranks, [&](const comm::Group& group) {
      const Curve whole = train(group, {});
      const Curve first =
          train(group, {.offload = pressed, .end = kStepSaved, .save = folder.path() + "/saved"});
      EXPECT_TRUE(first.decisions == 1 || ranks == 2) << first.decisions;
      for (const auto& form : {std::optional<OffloadOptions>(), std::optional(pressed)}) {
        const Curve second =
            train(group, {.offload = form, .begin = kStepSaved, .load = first.saved, .used = true});
        expect_tail(whole, second, form ? "offloaded" : "not offloaded");
      }
    });
  }
}

// What saved must not notice that it did.
TEST(OffloadCheckpoint, SavingChangesNothing) {
  const TempDir folder;
  const TrainingSegment plain{.offload = all_offloaded(UpdateSite::device)};
  TrainingSegment saving = plain;
  saving.save = folder.path();
  comm::run_threads(2, [&](const comm::Group& group) {
    const Curve a = train(group, plain), b = train(group, saving);
    EXPECT_EQ(a.losses, b.losses);
    for (size_t i = 0; i < a.weights.size(); ++i) EXPECT_TRUE(a.weights[i].equal(b.weights[i]));
  });
}

// Two ranks saved; one goes on, offloaded or not, in the same way.
TEST(OffloadCheckpoint, ResumesOnAnotherNumberOfRanks) {
  const TempDir folder;
  std::string saved;
  comm::run_threads(2, [&](const comm::Group& group) {
    const Curve curve = train(
        group,
        {.offload = all_offloaded(UpdateSite::device), .end = kStepSaved, .save = folder.path()});
    if (group.rank() == 0) saved = curve.saved;
  });
  const Curve plain = train({}, {.begin = kStepSaved, .load = saved});
  for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device}) {
    const Curve moved =
        train({}, {.offload = all_offloaded(site), .begin = kStepSaved, .load = saved});
    EXPECT_EQ(plain.losses, moved.losses);
    EXPECT_EQ(plain.norms, moved.norms);
    ASSERT_EQ(plain.weights.size(), moved.weights.size());
    for (size_t i = 0; i < plain.weights.size(); ++i)
      EXPECT_TRUE(plain.weights[i].equal(moved.weights[i])) << i;
  }
}

// A line of several parameters of which the checkpoint lacks one: that one keeps its values and its
// moments, which nothing was written into.
TEST(OffloadCheckpoint, AFlatParameterKeepsWhatTheCheckpointLacks) {
  const TempDir folder;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto train_flat = [&](int steps, auto&& body) {
      Tower model(2, 40);
      fill_parameters(*model, 3);
      model->to(dtype);
      auto sharded = parallel::fully_shard(*model, comm::Group{},
                                           {.units = parallel::ByType{{"Layer"}},
                                            .use_orig_params = false,
                                            .offload = all_offloaded(UpdateSite::device)});
      parallel::OffloadedAdamW optimizer(sharded, {.lr = 3e-3});
      for (int step = 0; step < steps; ++step) {
        model->forward(at::ones({2, 40})).square().mean().backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      body(sharded, optimizer);
    };
    const auto all_of = [](auto& sharded, auto& optimizer) {
      return checkpoint::state(sharded, optimizer);
    };
    const auto values = [](const std::vector<checkpoint::NamedSlice>& slices) {
      std::map<std::string, at::Tensor> found;
      for (const auto& slice : slices) {
        if (slice.saving) slice.saving();
        found[slice.placement.name] = slice.tensor.clone();
      }
      return found;
    };
    const auto lacks = [](const std::string& name) {
      return name.find("layer1.bias") != std::string::npos;
    };
    std::string saved;
    std::map<std::string, at::Tensor> there;
    train_flat(3, [&](auto& sharded, auto& optimizer) {
      auto slices = all_of(sharded, optimizer);
      there = values(slices);
      std::erase_if(slices, [&](const auto& slice) { return lacks(slice.placement.name); });
      saved = checkpoint::save(folder.path() + "/" + c10::toString(dtype),
                               {.step = 3, .slices = slices}, comm::Group{});
    });
    train_flat(1, [&](auto& sharded, auto& optimizer) {
      const auto before = values(all_of(sharded, optimizer));
      checkpoint::load(saved, all_of(sharded, optimizer), comm::Group{}, {.partial = true});
      int kept = 0;
      for (const auto& [name, tensor] : values(all_of(sharded, optimizer))) {
        if (name.ends_with(".step")) continue;
        EXPECT_TRUE(tensor.equal(lacks(name) ? before.at(name) : there.at(name))) << name;
        kept += lacks(name);
      }
      EXPECT_EQ(kept, dtype == at::kFloat ? 3 : 4);
    });
  }
}

}  // namespace
}  // namespace lockstep::test
