// SPDX-License-Identifier: Apache-2.0
#include "lockstep/flight/sign_fault.h"

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"

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
  std::istringstream entries{std::string(text)};
  for (std::string entry; std::getline(entries, entry, ';');) {
    std::map<std::string, std::string> values;
    std::istringstream words(entry);
    bool repeats = false;
    for (std::string word; std::getline(words, word, ',');) {
      const size_t equals = word.find('=');
      const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
      repeats |= !values.try_emplace(word.substr(0, equals), value).second;
    }
    if (!values.contains("sign")) continue;
    const bool kills = values["action"] == "kill";
    if (repeats || !values.contains("rank") || (!kills && values["action"] != "stop") ||
        values.size() != (values.contains("step") ? 4U : 3U))
      refuse_entry(entry);
    const int64_t whose = number_of(values["rank"], 0, entry),
                  sign = number_of(values["sign"], 1, entry),
                  step = values.contains("step") ? number_of(values["step"], 1, entry) : 1;
    if (whose != rank) continue;
    sign_ = static_cast<uint64_t>(sign);
    step_ = step;
    signal_ = kills ? SIGKILL : SIGSTOP;
  }
}

void SignFault::from_environment(int rank) {
  const char* const text = std::getenv("LOCKSTEP_FAULT");
  if (text != nullptr && RankEnv::detect().restart_count == 0) parse(text, rank);
}

void SignFault::count_armed(int64_t steps_done) {
  if (std::max<int64_t>(0, steps_done) < step_ - 1) return;
  if (seen_.fetch_add(1, std::memory_order_relaxed) + 1 == sign_) std::raise(signal_);
}

}  // namespace lockstep::flight
