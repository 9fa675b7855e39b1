// SPDX-License-Identifier: Apache-2.0
// A rank of the job that a launcher starts. Runs one of every_operation(), then a barrier, and says
// what came of it. Without arguments it lists the operations and the pieces of each.
// usage: verified_rank [BACKEND OPERATION]
#include <cstdio>
#include <string>

#include "lockstep/comm/control/job_store.h"
#include "lockstep/comm/group.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "tests/comm/control/every_operation.h"

using namespace lockstep;

namespace {

// The first rank, which serves the job's store, leaves when all have said what came of it.
void leave_together(const comm::Group& group) {
  launch::Store& store = comm::job_store(group);
  const auto said = [](int rank) { return "said " + std::to_string(rank); };
  std::fflush(stdout);
  store.set(said(group.rank()), "yes");
  if (group.rank() > 0) return;
  for (int rank = 1; rank < group.size(); ++rank)
    store.get(said(rank), Deadline(milliseconds{60'000}));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) {
    for (const test::NamedOperation& operation : test::every_operation())
      std::printf("%s %d\n", operation.name.c_str(), operation.pieces);
    return 0;
  }
  if (argc != 3) return 2;
  const comm::Group group = comm::init({.backend = argv[1]});
  for (const test::NamedOperation& operation : test::every_operation()) {
    if (operation.name != argv[2]) continue;
    try {
      operation.run(group);
      comm::barrier(group).wait();
      std::printf("rank %d: all is well\n", group.rank());
      return 0;
    } catch (const DamagedData& error) {
      std::printf("rank %d: damaged by rank %d: %s\n", group.rank(), error.rank(), error.what());
      leave_together(group);
      return 3;
    } catch (const std::exception& error) {
      std::printf("rank %d: something else: %s\n", group.rank(), error.what());
      leave_together(group);
      return 4;
    }
  }
  return 2;
}
