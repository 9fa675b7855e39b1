// SPDX-License-Identifier: Apache-2.0
// What a pipeline says of itself, and what it does beside a step.
#include "lockstep/parallel/pipeline/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <fstream>
#include <map>
#include <mutex>
#include <set>

#include "lockstep/parallel/pipeline/timeline.h"
#include "lockstep/schedule/render/render.h"
#include "lockstep/schedule/simulate.h"
#include "tests/parallel/pipeline/follow.h"

namespace lockstep::test {
namespace {

using parallel::layer;

// ---- what is built, and where ----

TEST(Pipeline, BuildsOnlyItsOwnLayers) {
  for (const PipelineOptions& options : kinds()) {
    std::mutex mutex;
    std::map<int, std::vector<int>> built;  // by rank
    comm::run_threads(2, [&](const comm::Group& group) {
      std::vector<parallel::Layer> layers;
      for (int i = 0; i < 8; ++i) {
        layers.push_back(layer("blocks." + std::to_string(i), [&, i, rank = group.rank()] {
          const std::lock_guard lock(mutex);
          built[rank].push_back(i);
          return Block(6);
        }));
      }
      const Pipeline pipeline(layers, group, options);
      const std::lock_guard lock(mutex);
      std::vector<int> expected;
      const int each = 8 / (2 * options.chunks);
      for (const int stage : pipeline.stages()) {
        for (int i = 0; i < each; ++i) expected.push_back(stage * each + i);
      }
      EXPECT_EQ(built[group.rank()], expected);
      EXPECT_EQ(pipeline.has_first_stage(), group.rank() == 0);
      EXPECT_EQ(pipeline.has_last_stage(),
                (group.rank() == 0) == (options.schedule == PipelineSchedule::zb_v));
      EXPECT_EQ(pipeline.modules().size(), static_cast<size_t>(options.chunks));
      EXPECT_TRUE(pipeline.sharded().empty());
    });
    EXPECT_EQ(built[0].size() + built[1].size(), 8u);
  }
}

TEST(Pipeline, RanksTogetherHaveEveryParameterOnce) {
  for (const bool tied : {false, true}) {
    for (PipelineOptions options : kinds()) {
      PipelineJob job{.layers = blocks(4)};
      std::multiset<std::string> expected;
      for (int i = 0; i < (tied ? 3 : 4); ++i) {
        for (const char* name : {".linear.weight", ".linear.bias"})
          expected.insert("blocks." + std::to_string(i) + name);
      }
      if (tied) {
        job.layers.back() = layer("blocks.0", [] { return Block(6); });
        options.tied = {"blocks.0.linear.bias", "blocks.0.linear.weight"};
      }
      std::mutex mutex;
      std::multiset<std::string> found;
      std::vector<std::string> copies;
      comm::run_threads(2, [&](const comm::Group& group) {
        const Pipeline pipeline(job.layers, group, options);
        const std::lock_guard lock(mutex);
        for (const auto& [name, tensor, parts] : pipeline.named_parameters()) found.insert(name);
        EXPECT_EQ(pipeline.parameters().size(), pipeline.named_parameters().size());
        for (size_t i = 0; i < pipeline.stages().size(); ++i) {
          const auto names = pipeline.tied_copies(i);
          copies.insert(copies.end(), names.begin(), names.end());
        }
      });
      EXPECT_EQ(found, expected);
      if (tied) {
        EXPECT_THAT(copies, testing::UnorderedElementsAre("blocks.0.linear.weight",
                                                          "blocks.0.linear.bias"));
      } else {
        EXPECT_TRUE(copies.empty());
      }
    }
  }
}

TEST(Pipeline, NamesWithDotsAreModules) {
  comm::run_threads(1, [](const comm::Group& group) {
    const Pipeline pipeline({layer("model.blocks.0", [] { return Block(6); }),
                             layer("model.blocks.1", [] { return Block(6); }),
                             layer("model.head", [] { return torch::nn::Linear(6, 2); })},
                            group);
    std::vector<std::string> names;
    for (const auto& item : pipeline.modules()[0]->named_modules("", false))
      names.push_back(item.key());
    EXPECT_THAT(names, testing::ElementsAre("model", "model.blocks", "model.blocks.0",
                                            "model.blocks.0.linear", "model.blocks.1",
                                            "model.blocks.1.linear", "model.head"));
  });
}

// ---- schedules ----

const std::vector<PipelineOptions>& all_kinds() {
  using enum PipelineSchedule;
  static const std::vector<PipelineOptions> all = {
      {.schedule = gpipe, .microbatches = 5},
      {.schedule = one_f_one_b, .microbatches = 5},
      {.schedule = interleaved, .microbatches = 4, .chunks = 2},
      {.schedule = zb_h1, .microbatches = 5},
      {.schedule = zb_h2, .microbatches = 5},
      {.schedule = zb_v, .microbatches = 5, .chunks = 2},
      {.schedule = dualpipe_v, .microbatches = 5, .chunks = 2}};
  return all;
}

TEST(Pipeline, DoesWhatTheScheduleSays) {
  for (const PipelineOptions& options : all_kinds()) {
    SCOPED_TRACE(layout::name_of(options.schedule));
    const PipelineJob job{.layers = blocks(4)};
    comm::run_threads(2, [&](const comm::Group& group) {
      Pipeline pipeline = make_pipeline(job, group, options);
      EXPECT_EQ(pipeline.stats().peak_live, 0);
      const auto rank = static_cast<size_t>(group.rank());
      const auto& actions = pipeline.schedule().actions[rank];
      for (int step = 0; step < 2; ++step) {
        pipeline.step(batch_of(job, 0));
        ASSERT_EQ(pipeline.timeline().size(), actions.size());
        Clock::time_point before;
        for (size_t i = 0; i < actions.size(); ++i) {
          const parallel::TimedAction& timed = pipeline.timeline()[i];
          EXPECT_EQ(timed.action, actions[i]);
          EXPECT_LE(before, timed.start);
          EXPECT_LE(timed.start, timed.end);
          before = timed.end;
        }
        const auto simulated = schedule::simulate(pipeline.schedule(), schedule::uniform({}));
        EXPECT_EQ(pipeline.stats().peak_live, simulated.peak_live[rank]);
        const bool splits = std::any_of(actions.begin(), actions.end(), [](const auto& action) {
          return action.op == schedule::Op::backward_weight;
        });
        EXPECT_EQ(pipeline.stats().peak_kept_bytes > 0, splits);
      }
    });
  }
}

// One layer for each stage: what a split backward keeps is a gradient of (3, 6) floats for each.
TEST(Pipeline, CountsWhatSplitBackwardsKeep) {
  const PipelineJob job{.layers = blocks(2)};
  comm::run_threads(2, [&](const comm::Group& group) {
    Pipeline pipeline =
        make_pipeline(job, group, {.schedule = PipelineSchedule::zb_h1, .microbatches = 6});
    pipeline.step(batch_of(job, 0));
    int now = 0, peak = 0;
    for (const auto& action : pipeline.schedule().actions[static_cast<size_t>(group.rank())]) {
      if (action.op == schedule::Op::backward_input) peak = std::max(peak, ++now);
      if (action.op == schedule::Op::backward_weight) --now;
    }
    EXPECT_EQ(now, 0);
    EXPECT_EQ(pipeline.stats().peak_kept_bytes, peak * 3 * 6 * int64_t{sizeof(float)});
  });
}

TEST(Pipeline, RunsAScheduleFromAFile) {
  for (const auto kind : {PipelineSchedule::zb_v, PipelineSchedule::interleaved}) {
    const auto wanted =
        schedule::generate({.kind = kind, .ranks = 2, .microbatches = 4, .chunks = 2});
    const std::string path =
        testing::TempDir() + "schedule_" + std::string(layout::name_of(kind)) + ".csv";
    std::ofstream(path) << schedule::to_csv(wanted);
    const PipelineOptions options{.schedule = PipelineSchedule::file,
                                  .microbatches = 4,
                                  .chunks = 2,
                                  .advanced = {.schedule_file = path}};
    const PipelineJob job{.layers = blocks(4)};
    follow(job, 2, options);
    comm::run_threads(2, [&](const comm::Group& group) {
      const Pipeline pipeline(job.layers, group, options);
      EXPECT_EQ(pipeline.schedule().actions, wanted.actions);
      EXPECT_EQ(pipeline.schedule().order, wanted.order);
    });
  }
}

// ---- accumulation ----

void compare_accumulation(const PipelineOptions& options, const PipelineJob& job) {
  SCOPED_TRACE(layout::name_of(options.schedule));
  const bool exact = std::get<parallel::DdpOptions>(options.data).reproducible;
  comm::run_threads(2, [&](const comm::Group& group) {
    PipelineOptions larger = options;
    larger.microbatches = 2 * options.microbatches;
    Pipeline whole = make_pipeline(job, group, larger);
    Pipeline parts = make_pipeline(job, group, options);
    for (int step = 0; step < 2; ++step) {  // the second counts micro-batches from the start again
      const std::vector<double> losses = doubles(whole.step(batch_of(job, 0)));
      std::vector<double> found = doubles(parts.step(batch_of(job, 0), {.accumulate = true}));
      const auto more = doubles(parts.step(batch_of(job, options.microbatches)));
      found.insert(found.end(), more.begin(), more.end());
      EXPECT_EQ(found, losses);
      const auto expected = whole.named_parameters(), tensors = parts.named_parameters();
      for (size_t i = 0; i < tensors.size(); ++i) {
        const at::Tensor a = tensors[i].tensor.grad(), b = expected[i].tensor.grad();
        EXPECT_TRUE(exact ? at::equal(a, b) : at::allclose(a, b, 1e-5, 1e-6)) << tensors[i].name;
        tensors[i].tensor.mutable_grad().reset();
        expected[i].tensor.mutable_grad().reset();
      }
    }
  });
}

TEST(Pipeline, StepsThatAccumulateAreOneStep) {
  for (const bool reproducible : {false, true}) {
    for (const bool tied : {false, true}) {
      for (PipelineOptions options : kinds()) {
        options.data = parallel::DdpOptions{.reproducible = reproducible};
        PipelineJob job{.layers = blocks(4)};
        if (tied) {
          job.layers.back() = layer("blocks.0", [] { return Block(6); });
          options.tied = {"blocks.0.linear.bias", "blocks.0.linear.weight"};
        }
        compare_accumulation(options, job);
      }
    }
  }
}

// ---- evaluation ----

// Another function in training.
struct NoisyImpl : BlockImpl {
  NoisyImpl() : BlockImpl(6) {}
  at::Tensor forward(const at::Tensor& x) {
    EXPECT_FALSE(x.requires_grad() && !is_training());
    return BlockImpl::forward(x) * (is_training() ? 2 : 1);
  }
};
TORCH_MODULE(Noisy);

TEST(Pipeline, EvaluatesAsOneProcess) {
  PipelineJob job;
  for (int i = 0; i < 4; ++i)
    job.layers.push_back(layer("noisy" + std::to_string(i), [] { return Noisy(); }));
  for (const PipelineOptions& options : kinds()) {
    SCOPED_TRACE(layout::name_of(options.schedule));
    comm::run_threads(2, [&](const comm::Group& group) {
      OneProcess expected(job);
      Pipeline pipeline = make_pipeline(job, group, options);
      pipeline.step(batch_of(job, 0));
      for (const at::Tensor& parameter : pipeline.parameters()) parameter.mutable_grad().reset();
      pipeline.eval();
      expected.module().eval();
      EXPECT_FALSE(pipeline.is_training());
      for (const int count : {1, 3, 3, 7}) {
        std::vector<double> losses;
        {
          const at::NoGradGuard no_grad;
          for (int i = 0; i < count; ++i) losses.push_back(expected.loss(i).item<double>());
        }
        PipelineBatch batch = batch_of(job, 0);
        batch.loss = [&](int i, const Tensors& outputs) {
          EXPECT_FALSE(outputs[0].requires_grad());
          return job.loss(i, outputs);
        };
        const int live = pipeline.stats().peak_live;
        EXPECT_EQ(doubles(pipeline.evaluate(batch, count)), losses);
        EXPECT_EQ(pipeline.stats().peak_live, live);  // of the last step
        for (const at::Tensor& parameter : pipeline.parameters())
          EXPECT_FALSE(parameter.grad().defined());
      }
      // And goes on to train.
      pipeline.train();
      expected.module().train();
      expect_near(doubles(pipeline.step(batch_of(job, 4))), expected.step(4, options.microbatches));
      expect_gradients(pipeline, expected);
    });
  }
}

}  // namespace
}  // namespace lockstep::test
