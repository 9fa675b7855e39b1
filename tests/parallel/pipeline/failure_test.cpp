// SPDX-License-Identifier: Apache-2.0
// What fails on one rank of a pipeline ends the step on all, with the reason.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "tests/parallel/pipeline/follow.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using namespace std::chrono_literals;
using parallel::function_layer;
using parallel::layer;
using parallel::Layer;
using testing::HasSubstr;

// Nobody who waits for this is told.
constexpr auto kTimeout = 60s, kAtOnce = 30s;

struct Failed {
  std::vector<std::string> messages;  // by rank
};

// What every rank is told.
Failed fails(int ranks, const PipelineJob& job, const PipelineOptions& options,
             const std::function<void(Pipeline&)>& use, const std::string& backend = "thread") {
  Failed failed{std::vector<std::string>(static_cast<size_t>(ranks), "nothing was thrown")};
  std::barrier all_done(ranks);  // nobody hears of it by someone's leaving
  const auto begin = std::chrono::steady_clock::now();
  comm::run_threads(ranks,
                    [&](const comm::Group& group) {
                      Pipeline pipeline = make_pipeline(job, group, options);
                      try {
                        use(pipeline);
                      } catch (const std::exception& error) {
                        failed.messages[static_cast<size_t>(group.rank())] = error.what();
                      }
                      all_done.arrive_and_wait();
                    },
                    {.backend = backend, .timeout = kTimeout});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kAtOnce);
  return failed;
}

Failed step_that_fails(int ranks, const PipelineJob& job, const PipelineOptions& options,
                       const std::string& backend = "thread") {
  return fails(
      ranks, job, options, [&](Pipeline& pipeline) { pipeline.step(batch_of(job, 0)); }, backend);
}

void expect_everywhere(const Failed& failed, const std::string& what) {
  for (size_t rank = 0; rank < failed.messages.size(); ++rank)
    EXPECT_THAT(failed.messages[rank], HasSubstr(what)) << "rank " << rank;
}

// In the backward of micro-batch `at`.
struct BreaksBackward : torch::autograd::Function<BreaksBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            bool breaks) {
    context->saved_data["breaks"] = breaks;
    return x.clone();
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    if (context->saved_data["breaks"].toBool()) throw std::runtime_error("a gradient is bad");
    return {gradients[0], at::Tensor()};
  }
};

std::vector<PipelineOptions> four_ranks() {
  std::vector<PipelineOptions> all = kinds();
  for (PipelineOptions& options : all) options.microbatches = 6;
  all[2].microbatches = 8;
  return all;
}

TEST(PipelineFailure, ALossThatThrows) {
  for (const PipelineOptions& options : four_ranks()) {
    for (const int64_t at : {0, 3, 5}) {
      PipelineJob job{.layers = blocks(8)};
      job.loss = [at](int64_t i, const Tensors& outputs) {
        if (i == at) throw std::runtime_error("the loss is lost");
        return outputs[0].sum();
      };
      expect_everywhere(step_that_fails(4, job, options), "the loss is lost");
    }
  }
}

TEST(PipelineFailure, ALayerThatThrows) {
  for (const PipelineOptions& options : four_ranks()) {
    for (const size_t broken : {0u, 3u, 7u}) {
      for (const int at : {1, 6}) {
        PipelineJob job{.layers = blocks(8)};
        const auto calls = std::make_shared<std::atomic<int>>(0);
        job.layers[broken] = function_layer([at, calls](const Tensors& in) {
          if (++*calls == at) throw std::runtime_error("a layer is bad");
          return in;
        });
        expect_everywhere(step_that_fails(4, job, options), "a layer is bad");
      }
    }
  }
}

// The last thing that happens, when other ranks have nothing left to receive.
TEST(PipelineFailure, ABackwardThatThrows) {
  for (const PipelineOptions& options : four_ranks()) {
    for (const char* backend : {"thread", "shm"}) {
      SCOPED_TRACE(layout::name_of(options.schedule));
      for (const size_t broken : {1u, 7u}) {
        for (const int at : {1, options.microbatches}) {
          PipelineJob job{.layers = blocks(8)};
          const auto calls = std::make_shared<std::atomic<int>>(0);
          job.layers[broken] = function_layer([at, calls](const Tensors& in) {
            return Tensors{BreaksBackward::apply(in[0], ++*calls == at)};
          });
          expect_everywhere(step_that_fails(4, job, options, backend), "a gradient is bad");
        }
      }
    }
  }
}

TEST(PipelineFailure, AnEvaluationThatThrows) {
  PipelineJob job{.layers = blocks(4)};
  job.loss = [](int64_t i, const Tensors& outputs) {
    if (i == 2) throw std::runtime_error("the loss is lost");
    return outputs[0].sum();
  };
  expect_everywhere(
      fails(2, job, {}, [&](Pipeline& pipeline) { pipeline.evaluate(batch_of(job, 0), 3); }),
      "the loss is lost");
}

// Each time, not only the first.
TEST(PipelineFailure, AFailedPipelineDoesNotGoOn) {
  PipelineJob job{.layers = blocks(4)};
  job.loss = [](int64_t i, const Tensors& outputs) {
    if (i == 0) throw std::runtime_error("the loss is lost");
    return outputs[0].sum();
  };
  comm::run_threads(2,
                    [&](const comm::Group& group) {
                      Pipeline pipeline = make_pipeline(job, group, {.microbatches = 2});
                      EXPECT_ANY_THROW(pipeline.step(batch_of(job, 0)));
                      EXPECT_THROW(pipeline.step(batch_of(job, 10)), CommError);
                      EXPECT_THROW(pipeline.evaluate(batch_of(job, 10), 1), CommError);
                    },
                    {.backend = "thread", .timeout = kTimeout});
}

// A rank that is not there any more.
TEST(PipelineFailure, ARankThatLeaves) {
  for (const char* backend : {"thread", "shm"}) {
    for (PipelineOptions options : kinds()) {
      options.microbatches = 6;
      for (const int leaver : {0, 1, 2}) {
        const PipelineJob job{.layers = blocks(12)};
        const auto begin = std::chrono::steady_clock::now();
        comm::run_threads(3,
                          [&](const comm::Group& group) {
                            Pipeline pipeline = make_pipeline(job, group, options);
                            pipeline.step(batch_of(job, 0));
                            if (group.rank() == leaver) return;
                            EXPECT_THROW(pipeline.step(batch_of(job, 6)), CommError);
                          },
                          {.backend = backend, .timeout = kTimeout});
        EXPECT_LT(std::chrono::steady_clock::now() - begin, kAtOnce)
            << backend << " " << layout::name_of(options.schedule) << " " << leaver;
      }
    }
  }
}

// Told through the store.
TEST(PipelineFailure, GlooEndsToo) {
  PipelineJob job{.layers = blocks(4)};
  job.loss = [](int64_t, const Tensors&) -> at::Tensor {
    throw std::runtime_error("the loss is lost");
  };
  comm::run_threads(2,
                    [&](const comm::Group& group) {
                      Pipeline pipeline = make_pipeline(job, group, {.microbatches = 2});
                      EXPECT_ANY_THROW(pipeline.step(batch_of(job, 0)));
                    },
                    {.backend = "gloo", .timeout = 1s});
}

// Calls `work` in the forward or in the backward.
struct Works : torch::autograd::Function<Works> {
  using Work = std::function<void()>;
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const Work* in_forward, const Work* in_backward) {
    context->saved_data["work"] = reinterpret_cast<int64_t>(in_backward);
    (*in_forward)();
    return x.clone();
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    (*reinterpret_cast<const Work*>(context->saved_data["work"].toInt()))();
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

Layer layer_with(const Works::Work& in_forward, const Works::Work& in_backward) {
  return function_layer([forward = std::make_shared<Works::Work>(in_forward),
                         backward = std::make_shared<Works::Work>(in_backward)](const Tensors& in) {
    return Tensors{Works::apply(in[0], forward.get(), backward.get())};
  });
}

// A rank that hangs, three ranks away from some of those that wait for it: they wait for the
// timeout once, not for each of their actions, and all name that rank and what it does.
TEST(PipelineFailure, ARankThatHangsIsNamedAfterOneTimeout) {
  for (const char* backend : {"thread", "shm", "gloo"}) {
    for (const bool in_backward : {false, true}) {
      if (in_backward && backend != std::string("thread")) continue;
      SCOPED_TRACE(backend);
      PipelineJob job{.layers = blocks(8)};
      std::promise<void> end;
      const auto ended = end.get_future().share();
      const auto calls = std::make_shared<std::atomic<int>>(0);
      const Works::Work hang = [&, calls] {
        if (++*calls == 3) ended.wait();  // micro-batch 2
      };
      const Works::Work nothing = [] {};
      job.layers[3] = layer_with(in_backward ? nothing : hang, in_backward ? hang : nothing);
      std::atomic<int> told = 0;
      std::vector<std::string> messages(4);
      std::barrier all_done(4);
      const auto begin = std::chrono::steady_clock::now();
      comm::run_threads(4,
                        [&](const comm::Group& group) {
                          Pipeline pipeline = make_pipeline(job, group, {.microbatches = 8});
                          std::string& message = messages[static_cast<size_t>(group.rank())];
                          try {
                            pipeline.step(batch_of(job, 0));
                          } catch (const std::exception& error) {
                            message = error.what();
                          }
                          if (++told == 3) end.set_value();
                          all_done.arrive_and_wait();
                        },
                        {.backend = backend, .timeout = 1s});
      EXPECT_LT(std::chrono::steady_clock::now() - begin, kAtOnce);
      for (size_t rank = 0; rank < messages.size(); ++rank) {
        const std::string& message = messages[rank];
        EXPECT_NE(message, "");
        // On gloo, the one that hung comes back to connections that the others have closed.
        if (rank == 1 && backend == std::string("gloo")) continue;
        EXPECT_THAT(message, HasSubstr("rank 1 of the pipeline"));
        EXPECT_THAT(message, HasSubstr("no progress for 1."));
        EXPECT_THAT(message, HasSubstr(in_backward ? "in the backward of micro-batch 2 of stage 1"
                                                   : "in the forward of micro-batch 2 of stage 1"));
      }
    }
  }
}

// A rank that has not come to the step at all.
TEST(PipelineFailure, ARankThatDoesNotBeginIsNamed) {
  const PipelineJob job{.layers = blocks(3)};
  std::atomic<int> told = 0;
  std::promise<void> end;
  const auto ended = end.get_future().share();
  comm::run_threads(3,
                    [&](const comm::Group& group) {
                      Pipeline pipeline = make_pipeline(job, group, {.microbatches = 4});
                      pipeline.step(batch_of(job, 0));
                      if (group.rank() == 0) return ended.wait();
                      try {
                        pipeline.step(batch_of(job, 4));
                        ADD_FAILURE() << "nothing was thrown";
                      } catch (const std::exception& error) {
                        EXPECT_THAT(error.what(), HasSubstr("rank 0 of the pipeline"));
                        EXPECT_THAT(error.what(), says("not begun"));
                      }
                      if (++told == 2) end.set_value();
                    },
                    {.backend = "thread", .timeout = 1s});
}

// Ranks wait longer than the timeout, but for one that moves on: in the forward at the end of the
// pipeline, in the backward at its beginning, where others have nothing left to do.
TEST(PipelineFailure, ASlowPipelineGoesOn) {
  PipelineJob job{.layers = blocks(6)};
  const Works::Work slow = [] { std::this_thread::sleep_for(200ms); }, nothing = [] {};
  job.layers[1] = layer_with(nothing, slow);
  job.layers[4] = layer_with(slow, nothing);
  comm::run_threads(3,
                    [&](const comm::Group& group) {
                      Pipeline pipeline = make_pipeline(
                          job, group, {.schedule = PipelineSchedule::gpipe, .microbatches = 8});
                      pipeline.step(batch_of(job, 0));
                    },
                    {.backend = "thread", .timeout = 1s});
}

}  // namespace
}  // namespace lockstep::test
