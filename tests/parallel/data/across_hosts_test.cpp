// SPDX-License-Identifier: Apache-2.0
// What crosses between hosts, counted in the trace.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "lockstep/comm/group.h"
#include "lockstep/core/trace.h"
#include "lockstep/parallel/data/gradient_hook.h"
#include "tests/support/trace_spans.h"

namespace lockstep::test {
namespace {

using parallel::GradientHook;
namespace hooks = parallel::hooks;

// Bytes that a rank sends to others in one operation of the trace.
double sent(const nlohmann::json& event) {
  const double ranks = event["args"]["ranks"], bytes = event["args"]["bytes"];
  const double share = (ranks - 1) / ranks * bytes;
  return event["name"] == "all_reduce" ? 2 * share : share;
}

// As in comm/overlap_test.cpp, whose main() sets LOCKSTEP_TRACE.
TEST(AcrossHosts, CompressesBetweenHostsAndNotInsideAHost) {
  constexpr int64_t kCount = 12'000;
  const std::pair<std::string, std::function<GradientHook()>> cases[] = {
      {"whole", [] { return hooks::across_hosts({}); }},
      {"half", [] { return hooks::across_hosts(hooks::fp16()); }}};
  for (const auto& [name, make] : cases) {
    comm::run_threads(4,
                      [&](const comm::Group& world) {
                        // A group of its own, so that the trace tells the two apart.
                        const comm::Group group = world.split(0, 0);
                        for (int more = name == "half" ? 1 : 0; more > 0; --more)
                          (void)group.split(0, 0);
                        parallel::GradientBucket bucket;
                        bucket.flat = at::ones({kCount});
                        if (const auto complete = make()(bucket, group)) complete();
                        EXPECT_EQ(bucket.flat[5].item<float>(), 1);
                      },
                      {.backend = "thread"}, {0, 0, 1, 1});
  }
  trace::flush();
  const auto events = read_trace(std::getenv("LOCKSTEP_TRACE"));
  std::map<std::string, double> across, inside;
  for (const auto& event : events) {
    if (event["ph"] != "X" || event["cat"] != "comm") continue;
    const std::string group = event["args"]["group"];
    if (!group.starts_with("world.0/0.")) continue;
    const std::string which = group.starts_with("world.0/0.0") ? "whole" : "half";
    if (group.find("/across") != std::string::npos) across[which] += sent(event);
    if (group.find("/host") != std::string::npos) inside[which] += sent(event);
  }
  // Each rank has half of the bucket; of it, a sum over two hosts sends as much as it has.
  EXPECT_EQ(across["whole"], 4 * kCount / 2 * 4);
  EXPECT_EQ(across["half"], across["whole"] / 2);
  EXPECT_GT(inside["whole"], 0);
  EXPECT_EQ(inside["half"], inside["whole"]);
}

}  // namespace
}  // namespace lockstep::test
