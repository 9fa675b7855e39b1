// SPDX-License-Identifier: Apache-2.0
// What does not fit together is refused, in one line that has the numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <chrono>

#include "lockstep/core/error.h"
#include "tests/parallel/pipeline/follow.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using namespace std::chrono_literals;
using parallel::FullyShardOptions;
using parallel::function_layer;
using parallel::layer;
using testing::Eq;
using testing::HasSubstr;

using Messages = std::vector<std::string>;  // by rank

Messages messages(int ranks, const std::function<void(const comm::Group&)>& use) {
  Messages found(static_cast<size_t>(ranks), "nothing was thrown");
  const auto begin = std::chrono::steady_clock::now();
  comm::run_threads(ranks,
                    [&](const comm::Group& group) {
                      try {
                        use(group);
                      } catch (const ConfigError& error) {
                        found[static_cast<size_t>(group.rank())] = error.what();
                      } catch (const CommError& error) {
                        found[static_cast<size_t>(group.rank())] =
                            std::string("CommError: ") + error.what();
                      }
                    },
                    {.backend = "thread", .timeout = 60s});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
  for (const std::string& message : found)
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  return found;
}

// Every rank says the same.
void expect_refused(const std::vector<parallel::Layer>& layers, const PipelineOptions& options,
                    const std::string& message) {
  const Messages found = messages(
      2, [&](const comm::Group& group) { const Pipeline pipeline(layers, group, options); });
  EXPECT_THAT(found, testing::Each(says(message)));
}

TEST(PipelineMisuse, LayersAndStages) {
  const std::string multiple = " ... multiple ... split";
  expect_refused(blocks(1), {}, "[pipeline] 1 layers over 2 stages" + multiple);
  expect_refused(blocks(5), {}, "[pipeline] 5 layers over 2 stages" + multiple);
  expect_refused({}, {}, "[pipeline] 0 layers over 2 stages" + multiple);
  expect_refused(blocks(6), {.schedule = PipelineSchedule::zb_v, .microbatches = 4, .chunks = 2},
                 "[pipeline] 6 layers over 4 stages" + multiple);
  const auto wrong = [&](std::vector<int> split, const std::string& is) {
    expect_refused(blocks(4), {.split = std::move(split)},
                   "[pipeline] split is " + is + " layers ... 2 stages ... one layer ... 4 layers");
  };
  wrong({1, 1, 2}, "1, 1, 2: 3 stages with 4");
  wrong({4}, "4: 1 stages with 4");
  wrong({1, 2}, "1, 2: 2 stages with 3");
  wrong({0, 4}, "0, 4: 2 stages with 4");
  wrong({-1, 5}, "-1, 5: 2 stages with 4");
}

TEST(PipelineMisuse, SchedulesThatDoNotFit) {
  expect_refused(blocks(4), {.chunks = 2},
                 "[schedule] ... 1f1b ... chunks is 2 ... one chunk ... interleaved, looped-bfs, "
                 "zb-1p, zb-v and dualpipe-v");
  expect_refused(blocks(4),
                 {.schedule = PipelineSchedule::dualpipe_v, .microbatches = 3, .chunks = 2},
                 "[schedule] ... dualpipe-v ... microbatches is 3 ... at least twice ... 4");
  expect_refused(blocks(4), {.microbatches = 0},
                 "[schedule] ... 1f1b ... microbatches is 0 ... at least 1");
  expect_refused(blocks(4), {.schedule = PipelineSchedule::file}, "[schedule] file ... named");
  const Messages found = messages(2, [](const comm::Group& group) {
    Pipeline pipeline(blocks(2), group);
    pipeline.evaluate({}, 0);
  });
  EXPECT_THAT(found, testing::Each(says("[pipeline] ... 0 micro-batches ... at least 1")));
}

// Only one rank can see it; the other hears of it, or that it is alone.
TEST(PipelineMisuse, GraphsAreOfOneWholeStageOnAGpu) {
  const auto refused = [](int ranks, PipelineOptions options, const std::string& message) {
    options.advanced.graphs = parallel::PipelineGraphs::always;
    const Messages found = messages(ranks, [&](const comm::Group& group) {
      const Pipeline pipeline(blocks(4), group, options);
    });
    for (const std::string& one : found) EXPECT_THAT(one, says(message));
  };
  refused(1, {.microbatches = 2}, "device ... cpu");
  refused(2, {.microbatches = 2}, "2 stages");
  refused(1, {.schedule = PipelineSchedule::gpipe, .microbatches = 2}, "schedule gpipe");
  refused(1, {.microbatches = 2, .data = FullyShardOptions{}}, "sharded");
  refused(1, {.microbatches = 2, .data = parallel::DdpOptions{.reproducible = true}},
          "reproducible");
  refused(1, {.microbatches = 2, .data = parallel::DdpOptions{.uneven_inputs = true}},
          "uneven_inputs");
  refused(1, {.microbatches = 2, .data = parallel::DdpOptions{.static_graph = true}},
          "static_graph");
  refused(1,
          {.microbatches = 2, .data = parallel::DdpOptions{.advanced = {.delay_all_reduce = true}}},
          "delay_all_reduce");
  // Elsewhere than on a GPU, graphs that are only wished for change nothing.
  PipelineOptions wished{.microbatches = 2};
  wished.advanced.graphs = parallel::PipelineGraphs::if_possible;
  EXPECT_THAT(messages(1,
                       [&](const comm::Group& group) {
                         Pipeline pipeline(blocks(4), group, wished);
                         const at::Tensor losses = pipeline.step(
                             {.inputs =
                                  [](int) {
                                    return Tensors{at::ones({2, 6})};
                                  },
                              .loss = [](int, const Tensors& out) { return out[0].sum(); },
                              .recorded_as = [](int) { return std::string("a"); }});
                         if (losses.numel() != 2) throw ConfigError("no losses");
                       }),
              testing::ElementsAre("nothing was thrown"));
}

TEST(PipelineMisuse, ANameTwiceInAStage) {
  const Messages found = messages(2, [](const comm::Group& group) {
    const Pipeline pipeline(
        {layer("a", [] { return Block(6); }), layer("b", [] { return Block(6); }),
         layer("c.d", [] { return Block(6); }), layer("c.d", [] { return Block(6); })},
        group);
  });
  EXPECT_THAT(found[0], HasSubstr("CommError"));
  EXPECT_THAT(found[1], testing::AllOf(HasSubstr("'c.d'"), HasSubstr("tied_layer()")));
  for (const char* name : {"", "a."}) {
    const Messages empty = messages(1, [&](const comm::Group& group) {
      const Pipeline pipeline({layer(name, [] { return Block(6); })}, group);
    });
    EXPECT_THAT(empty[0], HasSubstr(std::string("layer is named '") + name + "'"));
  }
}

TEST(PipelineMisuse, ANameInTwoStages) {
  auto layers = blocks(4);
  layers[3] = layer("blocks.1", [] { return torch::nn::Linear(6, 6); });
  layers[1] = layer("blocks.1", [] { return torch::nn::Linear(6, 6); });
  const Messages found = messages(2, [&](const comm::Group& group) {
    const Pipeline pipeline(layers, group, {.tied = {"blocks.1.bias"}});
  });
  EXPECT_THAT(found, testing::Each(testing::AllOf(HasSubstr("'blocks.1.weight'"),
                                                  HasSubstr("stages 0, 1"), HasSubstr("tied"))));
  // A rank that does not have it cannot name it.
  auto three = blocks(3);
  three[2] = layer("blocks.0.linear",
                   [] { return torch::nn::Linear(torch::nn::LinearOptions(6, 6).bias(false)); });
  const Messages partly =
      messages(3, [&](const comm::Group& group) { const Pipeline pipeline(three, group); });
  EXPECT_THAT(partly, testing::Each(HasSubstr("stages 0, 2")));
  EXPECT_THAT(partly,
              testing::ElementsAre(HasSubstr("'blocks.0.linear.weight'"), HasSubstr("a parameter"),
                                   HasSubstr("'blocks.0.linear.weight'")));
}

// A tied layer of a mistyped name would train parameters of its own.
TEST(PipelineMisuse, ATiedLayerOfAModuleThatNoLayerHas) {
  const auto tied = [](const char* name) {
    return parallel::tied_layer(
        name, [] { return Block(6); },
        [](BlockImpl& block, const parallel::Tensors& in) { return block.forward(in[0]); });
  };
  for (const int ranks : {1, 2}) {
    const auto found = [&](std::vector<parallel::Layer> layers) {
      return messages(ranks,
                      [&](const comm::Group& group) { const Pipeline pipeline(layers, group); });
    };
    std::vector<parallel::Layer> layers = blocks(3);
    layers.push_back(tied("blocks.9"));
    EXPECT_THAT(found(layers),
                testing::Each(testing::AllOf(HasSubstr("'blocks.9'"),
                                             HasSubstr("blocks.0, blocks.1, blocks.2"))));
    layers.back() = tied("blocks.0");  // of another stage, where there are two
    EXPECT_THAT(found(layers), testing::Each(Eq("nothing was thrown")));
    layers.back() = tied("blocks.2");  // of the same
    EXPECT_THAT(found(layers), testing::Each(Eq("nothing was thrown")));
  }
  torch::nn::Module model;
  const std::vector<parallel::Layer> alone{blocks(1)[0], tied("block.0")};
  EXPECT_THAT([&] { parallel::build_layers(alone, model, layout::Recompute::none); },
              testing::ThrowsMessage<ConfigError>(
                  testing::AllOf(HasSubstr("'block.0'"), HasSubstr("are blocks.0"))));
}

TEST(PipelineMisuse, TiedNames) {
  expect_refused(blocks(4), {.tied = {"blocks.9.linear.weight"}},
                 "[pipeline] ... 'blocks.9.linear.weight' ... no stage");
  auto layers = blocks(4);
  layers[3] = layer("blocks.0", [] { return Block(6, 7); });
  const auto found = [&] {
    return messages(2, [&](const comm::Group& group) {
      const Pipeline pipeline(layers, group,
                              {.tied = {"blocks.0.linear.weight", "blocks.0.linear.bias"}});
    });
  };
  // The first of the two, in an order that all ranks have.
  EXPECT_THAT(found(), testing::Each(testing::AnyOf(
                           testing::AllOf(HasSubstr("'blocks.0.linear.weight'"),
                                          HasSubstr("36 elements"), HasSubstr("42 in another")),
                           testing::AllOf(HasSubstr("'blocks.0.linear.bias'"),
                                          HasSubstr("6 elements"), HasSubstr("7 in another")))));
  layers[3] = layer("blocks.0", [] { return Block(9, 4); });
  EXPECT_THAT(found(), testing::Each(says("shape and type")));
}

TEST(PipelineMisuse, APlanNamesModulesOfSomeStage) {
  using layout::TensorStyle;
  expect_refused(
      blocks(4),
      {.plan = {{"blocks.3", TensorStyle::sequence}, {"blocks.4", TensorStyle::sequence}}},
      "[tensor] ... 'blocks.4' ... no module");
}

TEST(PipelineMisuse, ShardsWithoutNames) {
  const auto refused = [&](const PipelineOptions& options, const std::string& message) {
    const Messages found = messages(4, [&](const comm::Group& group) {
      const Pipeline pipeline(blocks(4), mesh::Mesh::parallel(group, {.dp = 2, .tp = 1, .pp = 2}),
                              options);
    });
    EXPECT_THAT(found, testing::Each(says(message)));
  };
  refused({.tied = {"blocks.0.linear.weight"}, .data = FullyShardOptions{}},
          "[pipeline] ... 1 chunks per rank ... 1 tied parameters ... 1 tensor-parallel ranks ... "
          "use_orig_params");
  refused({.schedule = PipelineSchedule::interleaved,
           .microbatches = 2,
           .chunks = 2,
           .data = FullyShardOptions{}},
          "[pipeline] ... 2 chunks per rank ... 0 tied parameters ... 1 tensor-parallel ranks ... "
          "use_orig_params");
}

// ---- in a step ----

Messages step_messages(const PipelineJob& job, const PipelineOptions& options = {}) {
  return messages(2, [&](const comm::Group& group) {
    Pipeline pipeline = make_pipeline(job, group, options);
    pipeline.step(batch_of(job, 0));
  });
}

TEST(PipelineMisuse, TooManyTensors) {
  PipelineJob job{.layers = blocks(2)};
  job.layers[0] = function_layer([](const Tensors& in) { return Tensors(9, in[0]); });
  job.layers[1] = function_layer([](const Tensors& in) { return Tensors{in[0]}; });
  const std::string message = "[pipeline] ... 9 tensors ... at most 8";
  const Messages found = step_messages(job);
  EXPECT_THAT(found[0], says(message));
  EXPECT_THAT(found[1], says("CommError: rank 0 ... " + message));
  job.layers[0] = function_layer([](const Tensors& in) { return Tensors(8, in[0]); });
  EXPECT_THAT(step_messages(job), testing::Each(Eq("nothing was thrown")));
}

TEST(PipelineMisuse, TensorsThatCannotTravel) {
  PipelineJob job{.layers = blocks(2)};
  job.layers[1] = function_layer([](const Tensors& in) { return Tensors{in[0]}; });
  job.loss = [](int64_t, const Tensors&) { return at::zeros({}); };
  job.layers[0] = function_layer([](const Tensors&) {
    return Tensors{at::ones(at::IntArrayRef({1, 1, 1, 1, 1, 1, 1, 1, 1}))};
  });
  EXPECT_THAT(step_messages(job)[0],
              says("[pipeline] ... 9 dimensions and layout Strided ... dense ... at most 8"));
  job.layers[0] = function_layer([](const Tensors& in) { return Tensors{in[0].to_sparse()}; });
  EXPECT_THAT(step_messages(job)[0],
              says("[pipeline] ... 2 dimensions and layout Sparse ... dense ... at most 8"));
}

TEST(PipelineMisuse, LossesThatAreNotOneNumber) {
  PipelineJob job{.layers = blocks(2)};
  job.loss = [](int64_t, const Tensors& outputs) { return outputs[0]; };
  const std::string start = "[pipeline] ... micro-batch 0 has ";
  EXPECT_THAT(step_messages(job)[1], says(start + "18 elements, must have 1"));
  EXPECT_THAT(step_messages(job)[0],
              says("CommError: rank 1 ... " + start + "18 elements, must have 1"));
  job.loss = [](int64_t, const Tensors&) { return at::Tensor(); };
  EXPECT_THAT(step_messages(job)[1], says(start + "0 elements, must have 1"));
  job.loss = [](int64_t, const Tensors& outputs) { return outputs[0].sum().reshape({1, 1}); };
  EXPECT_EQ(step_messages(job)[1], "nothing was thrown");
}

TEST(PipelineMisuse, ALayerThatDoesNotTakeWhatIsGiven) {
  PipelineJob job{.layers = blocks(2)};
  job.inputs = [](int64_t i) { return Tensors{random({3, 6}, i), random({3, 6}, i)}; };
  EXPECT_THAT(step_messages(job)[0], says("[pipeline] ... layer 'blocks.0' ... 2 tensors"));
}

}  // namespace
}  // namespace lockstep::test
