// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/background_saver.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <random>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "tests/support/subprocess.h"

namespace lockstep::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

NamedSlice named(const std::string& name, const at::Tensor& tensor) {
  return {layout::Placement::whole(name, tensor.sizes().vec()), tensor};
}

at::Tensor loaded(const std::string& path, const std::string& name, const at::Tensor& like) {
  const at::Tensor target = at::zeros_like(like, at::MemoryFormat::Contiguous);
  load(path, {named(name, target)}, {}, {.may_ignore = {""}});
  return target;
}

class Snapshot : public testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(All, Snapshot, testing::Bool(),
                         [](const auto& info) { return info.param ? "Reserved" : "NotReserved"; });

TEST_P(Snapshot, HoldsTheValuesAtTheCallOfSave) {
  const test::TempDir folder;
  // More than a block of the copy, not contiguous, and a block that both share.
  const at::Tensor a = at::rand({20000, 1000}), b = at::rand({300, 7}).t(), c = at::tensor(3);
  const at::Tensor flags = at::rand({13}) > 0.5, nothing = at::empty({0, 4}, at::kLong);
  const at::Tensor a_before = a.clone(), b_before = b.clone(), flags_before = flags.clone();
  const std::vector<NamedSlice> slices = {named("flags", flags), named("a", a), named("b", b),
                                          named("c", c), named("nothing", nothing)};
  Saver saver(folder.path());
  if (GetParam()) saver.reserve(slices);
  EXPECT_TRUE(saver.save({.step = 1, .slices = slices}));
  flags.zero_();
  a.zero_();
  b.zero_();
  c.zero_();
  saver.wait();
  const auto saved = saver.take_finished();
  ASSERT_EQ(saved.size(), 1U);
  EXPECT_EQ(saved[0].step, 1);
  EXPECT_EQ(saved[0].error, "");
  EXPECT_LE(saved[0].waited, saved[0].seconds);
  EXPECT_TRUE(saver.take_finished().empty());
  EXPECT_TRUE(at::equal(loaded(saved[0].path, "a", a), a_before));
  EXPECT_TRUE(at::equal(loaded(saved[0].path, "b", b), b_before));
  EXPECT_EQ(loaded(saved[0].path, "c", c).item<int>(), 3);
  EXPECT_TRUE(at::equal(loaded(saved[0].path, "flags", flags), flags_before));
  // The copy's memory is used again, for more and for less.
  for (const int64_t rows : {30000, 10}) {
    const at::Tensor other = at::rand({rows, 1000}), before = other.clone();
    saver.save({.step = rows, .slices = {named("other", other)}});
    other.zero_();
    saver.wait();
    EXPECT_TRUE(at::equal(loaded(saver.take_finished()[0].path, "other", other), before));
  }
}

TEST(Saver, SkipsOrWaitsWhileBusy) {
  const test::TempDir folder;
  std::atomic<int> skipped = 0;
  comm::run_threads(2, [&](const comm::Group& group) {
    const at::Tensor large = at::ones({32 << 20}), small = at::ones({1});
    Saver saver(folder.path(), group);
    EXPECT_TRUE(saver.save({.step = 1, .slices = {named("x", large)}}));
    // Megabytes are not on disk yet.
    if (!saver.save({.step = 2, .slices = {named("x", small)}}, WhenBusy::skip)) ++skipped;
    EXPECT_TRUE(saver.save({.step = 3, .slices = {named("x", small)}}, WhenBusy::wait));
    saver.wait();
    EXPECT_TRUE(saver.save({.step = 4, .slices = {named("x", small)}}, WhenBusy::skip));
  });
  EXPECT_EQ(skipped, 2);
  std::vector<int64_t> steps;
  for (const auto& checkpoint : formats::list_complete(folder.path()))
    steps.push_back(checkpoint.step);
  EXPECT_THAT(steps, testing::ElementsAre(1, 3, 4));
}

class SaverFailure : public testing::TestWithParam<bool> {};

TEST_P(SaverFailure, IsToldAndTheNextIsTried) {
  const test::TempDir folder;
  const std::string dir = folder.path() + "/file/checkpoints";
  test::write_file(folder.path() + "/file", "in the way");
  std::atomic<int> failed = 0;
  comm::run_threads(2, [&](const comm::Group& group) {
    const at::Tensor x = at::ones({4});
    Saver saver(dir, group, {.background = GetParam()});
    EXPECT_TRUE(saver.save({.step = 1, .slices = {named("x", x)}}));
    try {
      saver.wait();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(folder.path() + "/file"));
      ++failed;
    }
    const auto finished = saver.take_finished();
    ASSERT_EQ(finished.size(), 1U);
    EXPECT_EQ(finished[0].path, "");
    EXPECT_THAT(finished[0].error, HasSubstr(folder.path() + "/file"));
    saver.wait();  // it is told once
    if (group.rank() == 0) fs::remove(folder.path() + "/file");
    EXPECT_TRUE(saver.save({.step = 2, .slices = {named("x", x)}}));
    saver.wait();
    EXPECT_EQ(saver.take_finished()[0].path, dir + "/step-00000002");
  });
  EXPECT_EQ(failed, 2);
}

INSTANTIATE_TEST_SUITE_P(All, SaverFailure, testing::Bool(),
                         [](const auto& info) { return info.param ? "Background" : "Foreground"; });

TEST(Saver, WrongContentsThrowAtOnce) {
  const test::TempDir folder;
  Saver saver(folder.path());
  const NamedSlice right = named("x", at::ones({2}));
  EXPECT_THROW(saver.save({.step = -1, .slices = {right}}), ConfigError);
  EXPECT_THROW(saver.save({.step = 1, .slices = {right}, .state = {{"a", "no JSON"}}}),
               ConfigError);
  EXPECT_THROW(saver.save({.step = 1, .slices = {named("x", at::ones({2}, at::kShort))}}),
               ConfigError);
  EXPECT_THROW(
      saver.save({.step = 1, .slices = {{layout::Placement::whole("x", {3}), at::ones({2})}}}),
      ConfigError);
}

TEST(Saver, ACopyThatFailsOnOneRankFailsOnAll) {
  const test::TempDir folder;
  std::atomic<int> failed = 0;
  comm::run_threads(2, [&](const comm::Group& group) {
    Saver saver(folder.path(), group);
    const auto part =
        layout::Placement::whole("x", {2, 4}).narrow(0, {group.rank(), group.rank() + 1}, "dp");
    // Of a tensor without memory there is nothing to copy.
    const auto device = at::TensorOptions(group.rank() == 1 ? at::kMeta : at::kCPU);
    try {
      saver.save({.step = 1, .slices = {{part, at::ones({1, 4}, device)}}});
    } catch (const std::exception&) {
      ++failed;
    }
    saver.save({.step = 2, .slices = {{part, at::ones({1, 4})}}});
    saver.wait();
  });
  EXPECT_EQ(failed, 2);
  EXPECT_EQ(formats::newest_complete(folder.path())->step, 2);
}

// Ranks that save all the time, killed at a random instant: the newest checkpoint is whole.
TEST(Saver, SurvivesKills) {
  struct Shared {
    std::atomic<int64_t> complete;
  };
  auto* const shared = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(shared, MAP_FAILED);
  const test::TempDir folder;
  std::mt19937 random(std::random_device{}());
  int64_t first = 0;
  for (int kill_number = 0; kill_number < 50; ++kill_number) {
    shared->complete = first;
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      try {
        comm::run_threads(2, [&](const comm::Group& group) {
          Saver saver(folder.path(), group);
          for (int64_t step = first + 1;; ++step) {
            const at::Tensor mine = at::full({1000}, step, at::kLong);
            const auto part = layout::Placement::whole("part", {2, 1000})
                                  .narrow(0, {group.rank(), group.rank() + 1}, "dp");
            saver.save({.step = step,
                        .slices = {{part, mine.view({1, 1000})}, named("both", mine.clone())},
                        .keep = 2});
            mine.fill_(-1);
            // The one before has ended.
            if (group.rank() == 0) shared->complete = std::max(first, step - 1);
          }
        });
      } catch (const std::exception&) {
      }
      _exit(1);
    }
    // Half of them after a save that was complete, so that the series gets on.
    if (kill_number % 2 == 0) {
      ASSERT_TRUE(test::eventually([&] { return shared->complete > first; }));
    }
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::uniform_int_distribution<int>(0, 40000)(random)));
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "it ended by itself";
    const auto found = formats::newest_complete(folder.path());
    ASSERT_GE(found ? found->step : 0, shared->complete);
    for (const auto& checkpoint : formats::list_complete(folder.path()))
      formats::verify(checkpoint.path);
    if (!found) continue;
    first = found->step;
    const at::Tensor part = loaded(found->path, "part", at::empty({2, 1000}, at::kLong)),
                     both = loaded(found->path, "both", at::empty({1000}, at::kLong));
    ASSERT_TRUE(part.eq(found->step).all().item<bool>());
    ASSERT_TRUE(both.eq(found->step).all().item<bool>());
  }
  EXPECT_GE(first, 25);
  munmap(shared, sizeof(Shared));
}

}  // namespace
}  // namespace lockstep::checkpoint
