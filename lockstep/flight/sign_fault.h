// SPDX-License-Identifier: Apache-2.0
// A rank that ends or stops where its flight recorder counts a sign of life: at the beginning or
// end of an operation, of a step, of a phase, or while a checkpoint is written. For tests. Private:
// not installed.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

namespace lockstep::flight {

// From LOCKSTEP_FAULT=rank=R,sign=N,action=kill|stop, with step=S or without: signs count from 1
// once S - 1 steps are done. Only in the first start of a job. Entries are separated by semicolons;
// those without sign= belong to others.
class SignFault {
 public:
  // Takes over the entry of this rank, if there is one. Throws ConfigError for one that cannot be
  // read.
  void parse(std::string_view text, int rank);
  void from_environment(int rank);

  // At each sign, of any thread.
  void count(int64_t steps_done) {
    if (signal_ != 0) count_armed(steps_done);
  }

 private:
  void count_armed(int64_t steps_done);

  int signal_ = 0;
  int64_t step_ = 1;
  uint64_t sign_ = 0;
  std::atomic<uint64_t> seen_{0};
};

}  // namespace lockstep::flight
