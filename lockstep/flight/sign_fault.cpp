// SPDX-License-Identifier: Apache-2.0
#include "lockstep/flight/sign_fault.h"

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/flight/fault_text.h"

namespace lockstep::flight {
namespace {

[[noreturn]] void refuse_entry(const std::string& entry) {
  throw ConfigError(format(
      "LOCKSTEP_FAULT: '{}' must be rank=R[,step=S],sign=N,action=kill or action=stop, with R "
      "of at least 0, S and N of at least 1",
      entry));
}

int64_t number_of(const std::string& word, int64_t least, const std::string& entry) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  if (error != std::errc() || end != word.data() + word.size() || number < least)
    refuse_entry(entry);
  return number;
}

}  // namespace

void SignFault::parse(std::string_view text, int rank) {
  for (const FaultText& fault : parse_fault_texts(text)) {
    if (!fault.has("sign")) continue;
    const bool kills = fault.value("action") == "kill", has_step = fault.has("step");
    if (fault.repeats || (!kills && fault.value("action") != "stop") ||
        fault.values.size() != (has_step ? 4U : 3U))
      refuse_entry(fault.text);
    const int64_t whose = number_of(fault.value("rank"), 0, fault.text),
                  sign = number_of(fault.value("sign"), 1, fault.text),
                  step = has_step ? number_of(fault.value("step"), 1, fault.text) : 1;
    if (whose != rank) continue;
    sign_ = static_cast<uint64_t>(sign);
    step_ = step;
    signal_ = kills ? SIGKILL : SIGSTOP;
  }
}

void SignFault::from_environment(int rank) {
  const char* const text = std::getenv(kFaultVariable);
  if (text != nullptr && RankEnv::detect().restart_count == 0) parse(text, rank);
}

void SignFault::count_armed(int64_t steps_done) {
  if (std::max<int64_t>(0, steps_done) < step_ - 1) return;
  if (seen_.fetch_add(1, std::memory_order_relaxed) + 1 == sign_) std::raise(signal_);
}

}  // namespace lockstep::flight
