// SPDX-License-Identifier: Apache-2.0
// A rank of the job that a launcher starts. Runs one of every_operation(), then a barrier, and says
// what came of it. Without arguments it lists the operations and the pieces of each.
// usage: verified_rank [BACKEND OPERATION]
#include <cstdio>

#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"
#include "tests/comm/control/every_operation.h"

int main(int argc, char** argv) {
  using namespace lockstep;
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
      return 3;
    } catch (const std::exception& error) {
      std::printf("rank %d: something else: %s\n", group.rank(), error.what());
      return 4;
    }
  }
  return 2;
}
