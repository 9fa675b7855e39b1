// An operation runs while its caller computes: shown by the trace, not by a clock. Under each
// backend that has a thread of its own for it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/trace.h"
#include "tests/support/subprocess.h"
#include "tests/support/trace_spans.h"

namespace lockstep::comm {
namespace {

using nlohmann::json;
using test::overlap;
using test::read_trace;
using test::spans;

// Its own process sets LOCKSTEP_TRACE before anything reads it: see main below.
TEST(Overlap, CommunicationRunsBesideComputation) {
  for (const std::string backend : {"thread", "shm", "gloo"}) {
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
  for (const std::string backend : {"thread", "shm", "gloo"}) {
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

}  // namespace
}  // namespace lockstep::comm

int main(int argc, char** argv) {
  const lockstep::test::TempDir folder;
  setenv("LOCKSTEP_TRACE", folder.path().c_str(), 1);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
