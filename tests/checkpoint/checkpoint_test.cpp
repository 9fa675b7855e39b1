// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/checkpoint.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/safetensors.h"
#include "lockstep/optim/adamw.h"
#include "tests/support/subprocess.h"

namespace lockstep::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

at::Tensor counting(at::IntArrayRef sizes, double first = 0) {
  return (at::arange(layout::numel_of(sizes.vec()), at::kFloat) + first).view(sizes);
}

// Rows [begin, end) of `whole`, as a rank would hold them.
NamedSlice rows(const std::string& name, const at::Tensor& whole, int64_t begin, int64_t end) {
  const auto placement =
      layout::Placement::whole(name, whole.sizes().vec(), {"dp"}).narrow(0, {begin, end}, "dp");
  return {placement, whole.narrow(0, begin, end - begin).clone()};
}

TEST(Checkpoint, AModelAndItsOptimizerComeBack) {
  const test::TempDir folder;
  const auto make = [] {
    torch::nn::Sequential model(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4),
                                torch::nn::Linear(4, 2));
    return model;
  };
  auto model = make(), other = make();
  optim::AdamW optimizer(*model), second(*other);
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    model->forward(counting({5, 6}, i)).square().sum().backward();
    optimizer.step();
  }
  const std::string path = save(folder.path(), {.step = 3,
                                                .slices = state(*model, optimizer),
                                                .state = {{"samples", "15"}},
                                                .config = R"({"a": 1})"});
  const Loaded loaded = load(path, state(other, second));
  EXPECT_EQ(loaded.path, path);
  EXPECT_EQ(loaded.step, 3);
  EXPECT_EQ(loaded.state.at("samples"), "15");
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), other->named_parameters()[item.key()])) << item.key();
  }
  for (const auto& item : model->named_buffers()) {
    EXPECT_TRUE(at::equal(item.value(), other->named_buffers()[item.key()])) << item.key();
  }
  const auto saved = optimizer.state(), filled = second.state();
  ASSERT_EQ(saved.size(), filled.size());
  for (size_t i = 0; i < saved.size(); ++i) {
    EXPECT_TRUE(at::equal(saved[i].tensor, filled[i].tensor)) << saved[i].name;
  }
  // The model alone.
  auto third = make();
  load(path, slices_of(*third), {}, {.may_ignore = {"optim."}});
  EXPECT_TRUE(at::equal(third->parameters()[0], model->parameters()[0]));
}

TEST(Checkpoint, RanksThatHoldTheSameShareTheWriting) {
  const test::TempDir folder;
  const std::vector<std::string> names{"a", "b", "c", "d", "e"};
  comm::run_threads(3, [&](const comm::Group& group) {
    std::vector<NamedSlice> slices;
    for (const std::string& name : names) {
      slices.push_back({layout::Placement::whole(name, {4, 2}), counting({4, 2}, name[0])});
    }
    save(folder.path(), {.step = 1, .slices = slices}, group);
  });
  std::map<std::string, int> written;
  int files = 0;
  for (const auto& entry : fs::directory_iterator(folder.path() + "/step-00000001")) {
    if (entry.path().extension() != ".safetensors") continue;
    ++files;
    const formats::SafetensorsFile file(entry.path());
    for (const auto& tensor : file.entries()) ++written[tensor.name];
  }
  EXPECT_EQ(files, 3);
  for (const std::string& name : names) EXPECT_EQ(written[name], 1) << name;
}

// Copies of a model have other statistics on every rank; one rank's belong together.
TEST(Checkpoint, BuffersAreThoseOfTheFirstRank) {
  const test::TempDir folder;
  comm::run_threads(3, [&](const comm::Group& group) {
    torch::nn::Sequential model(torch::nn::BatchNorm1d(4), torch::nn::BatchNorm1d(4));
    for (at::Tensor buffer : model->buffers()) buffer.fill_(group.rank() + 5);
    const auto path = save(folder.path(), {.step = 1, .slices = slices_of(*model)}, group);
    load(path, slices_of(*model), group);
    for (const at::Tensor& buffer : model->buffers())
      EXPECT_TRUE(buffer.eq(5).all().item<bool>()) << group.rank();
  });
}

TEST(Checkpoint, BuffersThatAreUndefinedAreLeftOut) {
  const test::TempDir folder;
  torch::nn::Sequential model(
      torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(4).track_running_stats(false)));
  EXPECT_EQ(slices_of(*model).size(), 2u);
  load(save(folder.path(), {.step = 1, .slices = slices_of(*model)}), slices_of(*model));
}

// Shards of one layout, read into another.
TEST(Checkpoint, AnyLayoutReadsAnyOther) {
  const test::TempDir folder;
  const at::Tensor weight = counting({10, 3}), bias = counting({7}, 100),
                   scale = at::scalar_tensor(2.5);
  const auto slices_for = [&](const comm::Group& group) {
    const int64_t n = group.size(), r = group.rank();
    const auto cut = [&](int64_t size, int64_t i) { return size * i / n; };
    return std::vector<NamedSlice>{rows("weight", weight, cut(10, r), cut(10, r + 1)),
                                   rows("bias", bias, cut(7, r), cut(7, r + 1)),
                                   {layout::Placement::whole("scale", {}), scale.clone()}};
  };
  for (const int from : {1, 2, 3}) {
    comm::run_threads(from, [&](const comm::Group& group) {
      save(folder.path(), {.step = from, .slices = slices_for(group)}, group);
    });
    for (const int to : {1, 2, 4}) {
      std::atomic<int> different = 0;
      comm::run_threads(to, [&](const comm::Group& group) {
        auto targets = slices_for(group);
        const auto expected = slices_for(group);
        for (NamedSlice& target : targets) target.tensor.zero_();
        load(folder.path() + "/" + formats::step_folder_name(from), targets, group);
        for (size_t i = 0; i < targets.size(); ++i) {
          if (!at::equal(targets[i].tensor, expected[i].tensor)) ++different;
        }
      });
      EXPECT_EQ(different, 0) << from << " to " << to;
    }
  }
}

TEST(Checkpoint, KeepsTensorsWithoutElements) {
  const test::TempDir folder;
  const NamedSlice slice{layout::Placement::whole("cache", {0, 4}), at::empty({0, 4})};
  const std::string path = save(folder.path(), {.step = 1, .slices = {slice}});
  EXPECT_EQ(load(path, {slice}).step, 1);
  EXPECT_EQ(formats::read_manifest(path).tensors.size(), 1U);
}

TEST(Checkpoint, ConvertsTypes) {
  const test::TempDir folder;
  const at::Tensor values = counting({8});
  const std::string path =
      save(folder.path(), {.step = 1, .slices = {{layout::Placement::whole("x", {8}), values}}});
  const at::Tensor target = at::zeros({8}, at::kBFloat16);
  load(path, {{layout::Placement::whole("x", {8}), target}});
  EXPECT_TRUE(at::equal(target, values.to(at::kBFloat16)));
}

std::string failure(const std::function<void()>& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Checkpoint, NamesWhatDoesNotFit) {
  const test::TempDir folder;
  const auto slice = [](const std::string& name, const layout::Shape& shape) {
    return NamedSlice{layout::Placement::whole(name, shape), at::ones(shape)};
  };
  const std::string path = save(
      folder.path(), {.step = 1, .slices = {slice("a", {2}), slice("b", {3}), slice("c", {4})}});
  const NamedSlice wrong = slice("b", {5});
  const NamedSlice right = slice("a", {2});
  right.tensor.zero_();
  const std::string text = failure([&] { load(path, {right, wrong, slice("d", {1})}); });
  EXPECT_THAT(text, AllOf(HasSubstr("lacks: d"), HasSubstr("b is (3) there, (5) here"),
                          HasSubstr("no: c")));
  EXPECT_TRUE(at::equal(right.tensor, at::zeros({2})));  // nothing was written
  testing::internal::CaptureStderr();
  const std::string many = failure([&] {
    load(path, {right, slice("d", {1}), slice("e", {1}), slice("f", {1})});
  });
  EXPECT_THAT(many, AllOf(HasSubstr("lacks: d and 2 more"), HasSubstr("no: b and 1 more")));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(Checkpoint, LoadsWhatFits) {
  const test::TempDir folder;
  const auto slice = [](const std::string& name, const layout::Shape& shape, double value) {
    return NamedSlice{layout::Placement::whole(name, shape), at::full(shape, value)};
  };
  const std::string path =
      save(folder.path(),
           {.step = 1, .slices = {slice("a", {2}, 1), slice("b", {3}, 2), slice("c", {4}, 3)}});
  const auto a = slice("a", {2}, 0), b = slice("b", {5}, 0), d = slice("d", {1}, 0);
  testing::internal::CaptureStderr();
  load(path, {a, b, d}, {}, {.partial = true});
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("in part"), HasSubstr("lacks: d"),
                    HasSubstr("b is (3) there, (5) here"), HasSubstr("no: c")));
  EXPECT_TRUE(at::equal(a.tensor, at::ones({2})));
  EXPECT_TRUE(at::equal(b.tensor, at::zeros({5})));
  EXPECT_TRUE(at::equal(d.tensor, at::zeros({1})));
}

// Moments of a parameter that does not fit would be lost, but not its count of steps.
TEST(Checkpoint, LoadsNoPartOfAStateThatDoesNotFit) {
  const test::TempDir folder;
  const auto slices = [](int64_t size, double value) {
    const auto slice = [&](const std::string& name, const layout::Shape& shape) {
      return NamedSlice{layout::Placement::whole(name, shape), at::full(shape, value)};
    };
    return std::vector<NamedSlice>{slice("w", {size}), slice("optim.w.exp_avg", {size}),
                                   slice("optim.w.step", {}), slice("v", {2}),
                                   slice("optim.v.step", {})};
  };
  const std::string path = save(folder.path(), {.step = 1, .slices = slices(2, 1)});
  const auto targets = slices(3, 0);
  load(path, targets, {}, {.partial = true});
  for (const size_t i : {0, 1, 2}) EXPECT_EQ(targets[i].tensor.sum().item<float>(), 0) << i;
  EXPECT_EQ(targets[3].tensor.sum().item<float>(), 2);
  EXPECT_EQ(targets[4].tensor.item<float>(), 1);
  // Weights without any state are weights all the same.
  const std::string bare = save(folder.path(), {.step = 2, .slices = {slices(2, 3)[0]}});
  const auto others = slices(2, 0);
  load(bare, others, {}, {.partial = true});
  EXPECT_EQ(others[0].tensor.sum().item<float>(), 6);
  EXPECT_EQ(others[2].tensor.item<float>(), 0);
}

TEST(Checkpoint, WrongSlicesAreRefusedBeforeAnythingIsLoaded) {
  const test::TempDir folder;
  const NamedSlice x{layout::Placement::whole("x", {2, 3}), at::ones({2, 3})};
  const std::string path = save(folder.path(), {.step = 1, .slices = {x}});
  EXPECT_THROW(load(path, {{x.placement, at::zeros({3, 2})}}), ConfigError);
  EXPECT_THROW(load(path, {{x.placement, at::zeros({4, 3}, at::kDouble)}}), ConfigError);
  // Ranks that do not agree on a shape.
  std::atomic<int> caught = 0;
  comm::run_threads(2, [&](const comm::Group& group) {
    const layout::Shape shape{2, group.rank() == 0 ? 3 : 4};
    try {
      load(path, {{layout::Placement::whole("x", shape), at::zeros(shape)}}, group);
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr("x is (2, 3) there, (2, 4) here"));
      ++caught;
    }
  });
  EXPECT_EQ(caught, 2);
}

TEST(Checkpoint, KeepDoesNotRemoveWhatWasJustSaved) {
  const test::TempDir folder;
  const NamedSlice x{layout::Placement::whole("x", {2}), at::ones({2})};
  for (const int64_t step : {200, 300}) save(folder.path(), {.step = step, .slices = {x}});
  const std::string path = save(folder.path(), {.step = 150, .slices = {x}, .keep = 1});
  EXPECT_NO_THROW(formats::verify(path));
  EXPECT_EQ(formats::list_complete(folder.path()).size(), 3U);
}

// Columns of another type, which come through the buffer, in several pieces.
TEST(Checkpoint, LoadsIntoPartsThatAreNotContiguous) {
  const test::TempDir folder;
  const at::Tensor values = at::arange(3000 * 2048, at::kFloat).view({3000, 2048});
  const std::string path =
      save(folder.path(),
           {.step = 1, .slices = {{layout::Placement::whole("x", {3000, 2048}), values}}});
  const at::Tensor whole = at::zeros({3000, 2048}, at::kDouble);
  const auto placement =
      layout::Placement::whole("x", {3000, 2048}, {"tp"}).narrow(1, {5, 2000}, "tp");
  load(path, {{placement, whole.narrow(1, 7, 1995)}});
  EXPECT_TRUE(at::equal(whole.narrow(1, 7, 1995), values.narrow(1, 5, 1995).to(at::kDouble)));
  EXPECT_TRUE(at::equal(whole.narrow(1, 0, 7), at::zeros({3000, 7}, at::kDouble)));
}

// A number of a file of /proc, after a word.
int64_t proc(const std::string& file, const std::string& word) {
  const std::string text = test::read_file("/proc/self/" + file);
  return std::stoll(text.substr(text.find(word) + word.size()));
}

TEST(Checkpoint, RanksReadWhatTheyNeedIntoItsPlace) {
  const test::TempDir folder;
  constexpr int64_t kRows = 4096, kBytes = kRows * 8192 * 4;
  const auto half = [](int64_t rank, const at::Tensor& tensor) {
    return NamedSlice{layout::Placement::whole("x", {kRows, 8192}, {"dp"})
                          .narrow(0, {rank * kRows / 2, (rank + 1) * kRows / 2}, "dp"),
                      tensor};
  };
  std::string path;
  {
    const at::Tensor values = at::arange(kRows * 8192, at::kFloat).view({kRows, 8192});
    path = save(folder.path(),
                {.step = 1, .slices = {{layout::Placement::whole("x", {kRows, 8192}), values}}});
  }
  const std::array<at::Tensor, 2> parts = {at::zeros({kRows / 2, 8192}),
                                           at::zeros({kRows / 2, 8192})};
  test::write_file("/proc/self/clear_refs", "5");  // the peak begins anew
  const int64_t before = proc("status", "VmHWM:"), read_before = proc("io", "rchar:");
  comm::run_threads(2, [&](const comm::Group& group) {
    load(path, {half(group.rank(), parts[static_cast<size_t>(group.rank())])}, group);
  });
  EXPECT_LT(proc("io", "rchar:") - read_before, kBytes + (4 << 20));
  EXPECT_LT((proc("status", "VmHWM:") - before) << 10, 48 << 20);
  EXPECT_EQ(parts[1][kRows / 2 - 1][8191].item<float>(), static_cast<float>(kRows * 8192 - 1));
}

TEST(Checkpoint, TheNewestIsFoundByAllRanks) {
  const test::TempDir folder;
  EXPECT_FALSE(newest(folder.path()));
  comm::run_threads(2, [&](const comm::Group& group) {
    const NamedSlice slice{layout::Placement::whole("x", {2}), at::ones({2})};
    for (const int64_t step : {1, 2, 3})
      save(folder.path(), {.step = step, .slices = {slice}, .keep = 2}, group);
    EXPECT_EQ(newest(folder.path(), group), folder.path() + "/step-00000003");
  });
  EXPECT_EQ(formats::list_complete(folder.path()).size(), 2U);
}

// Ranks decide together what to do about it.
TEST(Checkpoint, ABadCheckpointIsTheSameErrorOnAllRanks) {
  const test::TempDir folder;
  const NamedSlice slice{layout::Placement::whole("x", {2}), at::ones({2})};
  const std::string path = save(folder.path(), {.step = 1, .slices = {slice}});
  std::atomic<int> caught = 0;
  comm::run_threads(2, [&](const comm::Group& group) {
    std::vector<NamedSlice> wanted{slice};
    if (group.rank() == 1) {
      wanted.push_back({layout::Placement::whole("y", {2}), at::ones({2})});
    }
    try {
      load(path, wanted, group);
    } catch (const CheckpointError&) {
      ++caught;
    }
  });
  EXPECT_EQ(caught, 2);
}

// A rank that cannot write must not leave the others waiting, nor a checkpoint that looks whole.
TEST(Checkpoint, OneRanksFailureIsEveryRanks) {
  const test::TempDir folder;
  std::vector<std::string> texts(2);
  comm::run_threads(2, [&](const comm::Group& group) {
    NamedSlice slice{layout::Placement::whole("x", {2}), at::ones({2})};
    if (group.rank() == 1) slice.tensor = at::ones({3});  // not what its placement says
    texts[static_cast<size_t>(group.rank())] =
        failure([&] { save(folder.path(), {.step = 1, .slices = {slice}}, group); });
  });
  EXPECT_THAT(texts[0], AllOf(HasSubstr("rank 1 failed"), HasSubstr("(3), must be (2)")));
  EXPECT_THAT(texts[1], HasSubstr("(3), must be (2)"));
  EXPECT_TRUE(formats::list_complete(folder.path()).empty());
}

TEST(Checkpoint, DamageIsNoticed) {
  const test::TempDir folder;
  const NamedSlice slice{layout::Placement::whole("x", {100}), at::ones({100})};
  const std::string path = save(folder.path(), {.step = 1, .slices = {slice}});
  const std::string file = path + "/shard-00001-model-00001-of-00001.safetensors";
  std::string bytes = test::read_file(file);
  bytes.back() = 'x';
  test::write_file(file, bytes);
  EXPECT_THAT(failure([&] { load(path, {slice}); }), HasSubstr(file));
}

}  // namespace
}  // namespace lockstep::checkpoint
