// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/mpi/runtime.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include "lockstep/comm/backends/mpi/bootstrap.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::mpi {
namespace {

std::atomic<bool> finalize_at_exit{false};
std::atomic<int> unfinished{0};

// What no thread waits for, such as a gather that was prefetched for a step that does not come,
// ends when all ranks have begun it. mpirun takes a rank that leaves before for one that has
// failed.
void finalize() {
  const Deadline deadline(kDefaultTimeout);
  while (finalize_at_exit && unfinished > 0 && !deadline.passed())
    std::this_thread::sleep_for(milliseconds{1});
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalize_at_exit && unfinished == 0 && finalized == 0) MPI_Finalize();
}

}  // namespace

void require_mpi() {
  static std::once_flag once;
  std::call_once(once, [] {
    int initialized = 0, level = MPI_THREAD_SINGLE;
    MPI_Initialized(&initialized);
    if (initialized != 0) {
      MPI_Query_thread(&level);
    } else {
      MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
      finalize_at_exit = true;
      std::atexit(finalize);
      std::at_quick_exit(finalize);
    }
    if (level < MPI_THREAD_MULTIPLE) {
      throw ConfigError(format(
          "backend mpi: MPI was started with thread level {}, needs MPI_THREAD_MULTIPLE ({})",
          level, static_cast<int>(MPI_THREAD_MULTIPLE)));
    }
  });
}

void do_not_finalize() { finalize_at_exit = false; }

Unfinished::Unfinished() { ++unfinished; }
Unfinished::~Unfinished() { --unfinished; }

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char words[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, words, &length);
  throw CommError(format("{}: {}", call, std::string(words, static_cast<size_t>(length))));
}

std::string share_from_rank0(const std::string& text) {
  require_mpi();
  int length = static_cast<int>(text.size());
  check_mpi(MPI_Bcast(&length, 1, MPI_INT, 0, MPI_COMM_WORLD), "MPI_Bcast");
  std::string shared = text;
  shared.resize(static_cast<size_t>(length));
  check_mpi(MPI_Bcast(shared.data(), length, MPI_CHAR, 0, MPI_COMM_WORLD), "MPI_Bcast");
  return shared;
}

}  // namespace lockstep::comm::mpi
