// SPDX-License-Identifier: Apache-2.0
// What a program that dies of SIGSEGV in the memory of a sharded model says first: the name of the
// parameter, and what to call instead. Private: not installed.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "lockstep/parallel/intercept/tag.h"

namespace lockstep::parallel::detail {

struct FaultRange;

// While one is alive, a fault at its addresses is reported on stderr. Afterwards the signal goes to
// the handler that the program had, or does what it would have done. The first one installs the
// handler for the rest of the process, unless LOCKSTEP_INTERCEPT leaves "faults" out.
class FaultReport {
 public:
  struct Text {
    std::string before;
    std::shared_ptr<const FlatNames> names;  // by their places in the addresses
    std::string after;
  };

  FaultReport() = default;
  FaultReport(const void* begin, size_t bytes, Text text);
  ~FaultReport();
  FaultReport(FaultReport&& other) noexcept = default;
  FaultReport& operator=(FaultReport&& other) noexcept {
    std::swap(range_, other.range_);
    return *this;
  }

 private:
  std::shared_ptr<FaultRange> range_;
};

}  // namespace lockstep::parallel::detail
