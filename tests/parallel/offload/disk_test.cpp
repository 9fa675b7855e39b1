// SPDX-License-Identifier: Apache-2.0
// Optimizer state on disk: the same bits, and errors that say where.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <tuple>

#include "lockstep/core/error.h"
#include "tests/parallel/offload/training.h"
#include "tests/support/child_process.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using layout::OffloadOptions;
using layout::OffloadStrategy;
using layout::UpdateSite;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

const OffloadRun kRun{.layers = 6, .width = 112};

// Parameters and gradients of 600 kB must be on the host, and there is little room beside them.
OffloadOptions on_disk(const std::string& folder, UpdateSite site) {
  return {.param_budget = 128 * kKiB,
          .host_budget = 800 * kKiB,
          .device_limit = 320 * kKiB,
          .disk = folder,
          .advanced = {
              .host_limit = 64 * kMiB, .strategy = OffloadStrategy::extreme, .update_site = site}};
}

void expect_same_from_disk(int ranks, OffloadRun run, const OffloadOptions& offload) {
  comm::run_threads(ranks, [&](const comm::Group& group) {
    const OffloadCurve plain = train_offloaded(group, run, {});
    OffloadRun counted = run;
    parallel::OffloadStats before;
    counted.after = [&](int step, const parallel::ShardedModel& model, optim::Optimizer& each) {
      dynamic_cast<parallel::OffloadedOptimizer&>(each).wait();
      const parallel::OffloadStats stats = parallel::offload_stats(model);
      EXPECT_GT(stats.from_disk, before.from_disk) << step;
      EXPECT_GT(stats.to_disk, before.to_disk) << step;
      const layout::StateCodecs none;
      if (offload.codec == none && step > 0) {  // the first has also written zeros
        EXPECT_EQ(stats.from_disk - before.from_disk, stats.state_on_disk);
        EXPECT_EQ(stats.to_disk - before.to_disk, stats.state_on_disk);
      }
      before = stats;
    };
    const OffloadCurve moved = train_offloaded(group, counted, offload);
    ASSERT_EQ(plain.losses, moved.losses) << layout::name_of(offload.advanced.update_site);
    EXPECT_TRUE(plain == moved);
    EXPECT_GT(moved.stats.state_on_disk, 0);
    EXPECT_LE(moved.stats.host_peak, offload.host_budget);
    EXPECT_LE(moved.stats.device_peak, offload.device_limit);
  });
}

TEST(OffloadDisk, HasTheBitsOfTrainingWithout) {
  const TempDir folder;
  for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device}) {
    expect_same_from_disk(1, kRun, on_disk(folder.path(), site));
    OffloadRun half = kRun;
    half.dtype = at::kBFloat16;
    OffloadOptions offload = on_disk(folder.path(), site);
    offload.host_budget = 400 * kKiB;
    expect_same_from_disk(1, half, offload);
    offload.host_budget = 220 * kKiB;
    offload.device_limit = 384 * kKiB;
    expect_same_from_disk(2, half, offload);
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(OffloadDisk, LosslessCodecsHaveTheSameBits) {
  const TempDir folder;
  for (const char* codecs : {"lossless", "exp_avg=lossless", "exp_avg_sq=lossless"}) {
    OffloadOptions offload = on_disk(folder.path(), UpdateSite::cpu);
    offload.codec = layout::parse_state_codecs(codecs);
    expect_same_from_disk(1, kRun, offload);
  }
}

// Without gradients state stays zero, and all of it fits on the host. With them it grows, and what
// no longer fits goes to the disk: the same bits, and no error.
TEST(OffloadDisk, LosslessStateIsWhereItFits) {
  const TempDir folder;
  OffloadOptions offload = on_disk(folder.path(), UpdateSite::cpu);
  offload.codec = layout::parse_state_codecs("lossless");
  OffloadRun run = kRun;
  run.steps = 4;
  run.before = [](int step, const parallel::ShardedModel& model, optim::Optimizer&) {
    const at::NoGradGuard no_grad;
    if (step > 1) return;
    for (const at::Tensor& parameter : model.parameters()) parameter.grad().zero_();
  };
  std::vector<int64_t> on_disk_after;
  OffloadRun counted = run;
  counted.after = [&](int, const parallel::ShardedModel& model, optim::Optimizer& each) {
    dynamic_cast<parallel::OffloadedOptimizer&>(each).wait();
    on_disk_after.push_back(parallel::offload_stats(model).state_on_disk);
  };
  const OffloadCurve plain = train_offloaded({}, run, {});
  const OffloadCurve moved = train_offloaded({}, counted, offload);
  EXPECT_TRUE(plain == moved);
  EXPECT_LE(moved.stats.host_peak, offload.host_budget);
  EXPECT_EQ(on_disk_after[0], 0);
  EXPECT_EQ(on_disk_after[1], 0);
  EXPECT_GT(on_disk_after[2], 0);
  EXPECT_EQ(moved.stats.state_on_disk, on_disk_after[3]);
  // The plan, which knows nothing of LZ4, has more there than fits in the end, or as much.
  OffloadOptions whole = offload;
  whole.codec = {};
  const OffloadCurve planned = train_offloaded({}, run, whole);
  EXPECT_LE(moved.stats.state_on_disk, planned.stats.state_on_disk);
  EXPECT_EQ(moved.stats.state_on_disk + moved.stats.state_on_host,
            planned.stats.state_on_disk + planned.stats.state_on_host);
}

// State has the room that LZ4 leaves of that for parameters, and gives it back when these grow.
TEST(OffloadDisk, LosslessParametersLeaveRoomForState) {
  const TempDir folder;
  const auto run = [&](const char* codecs) {
    OffloadOptions offload = on_disk(folder.path(), UpdateSite::cpu);
    offload.codec = layout::parse_state_codecs(codecs);
    Tower model(6, 112);
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model->parameters()) parameter.fill_(0.01);
    auto sharded = parallel::fully_shard(*model, comm::Group{},
                                         {.units = parallel::ByType{{"Layer"}},
                                          .min_num_params = 100,
                                          .use_orig_params = true,
                                          .offload = offload});
    parallel::OffloadedAdamW optimizer(sharded, {.lr = 0, .weight_decay = 0});
    at::manual_seed(5);
    auto state = optimizer.state();
    for (auto& [name, tensor] : state) {
      tensor = tensor.clone();
      if (tensor.dim() > 0) tensor.uniform_(0.1, 1);
    }
    optimizer.load_state(state);
    const auto step = [&] {
      const at::AutoGradMode grad(true);
      model->forward(at::ones({2, 112})).square().mean().backward();
      optimizer.step();
      optimizer.wait();
      optimizer.zero_grad();
      return parallel::offload_stats(sharded);
    };
    const parallel::OffloadStats first = step();
    std::vector<optim::NamedTensor> random;
    for (const auto& [name, tensor] : sharded.full_state_dict())
      random.push_back({name, at::rand_like(tensor)});
    sharded.load_full_state_dict(random);
    step();
    const parallel::OffloadStats grown = step();
    EXPECT_LE(grown.host_bytes, offload.host_budget) << codecs;
    const auto after = sharded.full_state_dict();
    for (size_t i = 0; i < after.size(); ++i)
      EXPECT_TRUE(after[i].tensor.equal(random[i].tensor)) << codecs << " " << after[i].name;
    return std::tuple(first.state_on_disk, grown.state_on_disk, optimizer.state());
  };
  const auto [whole, whole_later, whole_state] = run("lossless");
  const auto [packed, packed_later, packed_state] = run("lossless,params=lossless");
  EXPECT_GT(whole, packed + 150 * kKiB);
  EXPECT_GT(packed_later, packed) << "parameters have grown";
  for (size_t i = 0; i < whole_state.size(); ++i)
    EXPECT_TRUE(whole_state[i].tensor.equal(packed_state[i].tensor)) << whole_state[i].name;
}

TEST(OffloadDisk, UpdatesInBackward) {
  const TempDir folder;
  OffloadRun run = kRun;
  run.clip = 0;
  OffloadOptions offload = on_disk(folder.path(), UpdateSite::device);
  offload.advanced.clip_mode = layout::ClipMode::none;
  offload.host_budget = 500 * kKiB;
  expect_same_from_disk(1, run, offload);
}

TEST(OffloadDisk, AFolderThatIsNotThereIsRefused) {
  const TempDir folder;
  const std::string missing = folder.path() + "/missing";
  Tower model(6, 112);
  EXPECT_THAT(
      [&] {
        parallel::fully_shard(*model, comm::Group{},
                              {.units = parallel::ByType{{"Layer"}},
                               .offload = on_disk(missing, UpdateSite::device)});
      },
      ThrowsMessage<ConfigError>(HasSubstr(missing)));
}

// Files may not grow beyond a little: what a full disk looks like to one process.
TEST(OffloadDisk, AFullDiskIsAnErrorThatNamesTheFolder) {
  for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device}) {
    for (const rlim_t space : {rlim_t{16} << 10, rlim_t{440} << 10}) {
      const TempDir folder;
      EXPECT_EQ(in_a_process([&]() -> std::string {
                  signal(SIGXFSZ, SIG_IGN);
                  const rlimit limit{space, space};
                  if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return "setrlimit";
                  try {
                    train_offloaded({}, kRun, on_disk(folder.path(), site));
                    return "a full disk was not noticed";
                  } catch (const Error& error) {
                    const std::string text = error.what();
                    const bool says = text.find(folder.path()) != std::string::npos &&
                                      text.find("File too large") != std::string::npos;
                    return says ? "" : text;
                  }
                }),
                "");
      EXPECT_TRUE(fs::is_empty(folder.path()));
    }
  }
}

}  // namespace
}  // namespace lockstep::test
