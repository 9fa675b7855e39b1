// SPDX-License-Identifier: Apache-2.0
// An operation runs while its caller computes: shown by the trace, not by a clock. Under each
// backend that has a thread of its own for it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "lockstep/comm/backends/nccl/nccl.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/core/trace.h"
#include "tests/comm/backends/nccl/fake_nccl.h"
#include "tests/support/subprocess.h"
#include "tests/support/trace_spans.h"

namespace lockstep::comm {
namespace {

using lockstep::test::overlap;
using lockstep::test::read_trace;
using lockstep::test::spans;
using nlohmann::json;

// main(), below, sets LOCKSTEP_TRACE before anything reads it.
TEST(Overlap, CommunicationRunsBesideComputation) {
  for (const std::string backend : {"thread", "shm", "gloo", "fake"}) {
    run_threads(2,
                [&](const Group& group) {
                  at::Tensor gradient = at::ones({4'000'000});
                  Work work = all_reduce(gradient, group, {.tag = backend});
                  {
                    // Computes until the operation is done: it cannot wait for it, so somebody else
                    // must have moved the data.
                    const trace::Span span("compute", "compute " + backend);
                    at::Tensor weights = at::ones({64, 64});
                    const Deadline deadline(milliseconds{60'000});
                    while (!work.done() && !deadline.passed())
                      weights = weights.matmul(weights).clamp(-1, 1);
                  }
                  EXPECT_TRUE(work.done()) << backend;
                  work.wait();
                  EXPECT_EQ(gradient[1].item<float>(), 2);
                },
                {.backend = backend});
  }
  trace::flush();
  const json events = read_trace(std::getenv("LOCKSTEP_TRACE"));
  for (const std::string backend : {"thread", "shm", "gloo", "fake"}) {
    for (int rank = 0; rank < 2; ++rank) {
      const auto compute = spans(events, rank, "compute " + backend);
      ASSERT_EQ(compute.size(), 1u);
      bool inside = false;
      for (const auto& span : spans(events, rank, "all_reduce", backend))
        inside = inside || (overlap(span, compute[0]) && span.bytes == 16'000'000);
      EXPECT_TRUE(inside) << backend << " rank " << rank
                          << ": no all_reduce inside the computation";
    }
  }
}

// By a strategy too, which the trace names.
TEST(Overlap, StrategiesRunBesideComputation) {
  using layout::CommStrategy;
  const auto strategies = {CommStrategy::ring, CommStrategy::tree, CommStrategy::hierarchical};
  for (const CommStrategy strategy : strategies) {
    const std::string name(layout::name_of(strategy));
    run_threads(4,
                [&](const Group& group) {
                  at::Tensor gradient = at::ones({1'000'000});
                  Work work = all_reduce(gradient, group, {.tag = "by " + name});
                  {
                    const trace::Span span("compute", "compute by " + name);
                    at::Tensor weights = at::ones({64, 64});
                    const Deadline deadline(milliseconds{60'000});
                    while (!work.done() && !deadline.passed())
                      weights = weights.matmul(weights).clamp(-1, 1);
                  }
                  EXPECT_TRUE(work.done()) << name;
                  work.wait();
                  EXPECT_EQ(gradient[1].item<float>(), 4);
                },
                {.backend = "thread", .strategy = strategy}, {0, 0, 1, 1});
  }
  trace::flush();
  const json events = read_trace(std::getenv("LOCKSTEP_TRACE"));
  for (const CommStrategy strategy : strategies) {
    const std::string name(layout::name_of(strategy));
    for (int rank = 0; rank < 4; ++rank) {
      const auto compute = spans(events, rank, "compute by " + name);
      ASSERT_EQ(compute.size(), 1u);
      int found = 0;
      for (const json& event : events) {
        if (event["name"] != "all_reduce" || event["pid"] != rank) continue;
        if (event["args"]["strategy"] != name || event["args"]["tag"] != "by " + name) continue;
        const double start = event["ts"];
        EXPECT_TRUE(overlap({start, start + event["dur"].get<double>()}, compute[0])) << name;
        EXPECT_EQ(event["args"]["bytes"], 4'000'000);
        ++found;
      }
      EXPECT_EQ(found, 1) << name << " rank " << rank;
    }
  }
}

}  // namespace
}  // namespace lockstep::comm

int main(int argc, char** argv) {
  const lockstep::test::TempDir folder;
  setenv("LOCKSTEP_TRACE", folder.path().c_str(), 1);
  // Of NCCL: a span has the times of the stream, not of the calls.
  lockstep::comm::detail::add_backend(
      {"fake", [] { return true; },
       lockstep::comm::nccl::factory(lockstep::comm::fake::engine(), "fake")});
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
