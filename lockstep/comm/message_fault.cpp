// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/message_fault.h"

#include <charconv>
#include <cstdlib>
#include <map>
#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::detail {
namespace {

[[noreturn]] void refuse(const std::string& entry) {
  throw ConfigError(
      format("LOCKSTEP_FAULT: '{}' must be rank=R,message=N,action=flip:BIT with R and BIT of at "
             "least 0 and N of at least 1",
             entry));
}

uint64_t number_in(const std::string& word, const std::string& entry) {
  uint64_t number = 0;
  const char* const end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, number);
  if (word.empty() || stop != end || error != std::errc()) refuse(entry);
  return number;
}

}  // namespace

std::shared_ptr<MessageFault> MessageFault::parse(const std::string& text, int rank) {
  std::shared_ptr<MessageFault> fault;
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ';');) {
    std::map<std::string, std::string> values;
    std::istringstream words(entry);
    bool repeats = false;
    for (std::string word; std::getline(words, word, ',');) {
      const size_t equals = word.find('=');
      const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
      repeats |= !values.try_emplace(word.substr(0, equals), value).second;
    }
    if (!values.contains("message")) continue;
    constexpr std::string_view kFlip = "flip:";
    if (repeats || values.size() != 3 || !values.contains("rank") ||
        !values["action"].starts_with(kFlip))
      refuse(entry);
    const uint64_t whose = number_in(values["rank"], entry);
    const uint64_t message = number_in(values["message"], entry);
    const uint64_t bit = number_in(values["action"].substr(kFlip.size()), entry);
    if (message == 0) refuse(entry);
    if (whose != static_cast<uint64_t>(rank)) continue;
    fault = std::make_shared<MessageFault>();
    fault->message_ = message;
    fault->bit_ = bit;
  }
  return fault;
}

std::shared_ptr<MessageFault> MessageFault::from_environment(int rank) {
  const char* const text = std::getenv("LOCKSTEP_FAULT");
  return text == nullptr ? nullptr : parse(text, rank);
}

void MessageFault::apply(std::span<std::byte> piece) {
  if (piece.empty() || ++arrived_ != message_) return;
  const uint64_t bit = bit_ % (piece.size() * 8);
  piece[bit / 8] ^= std::byte{1} << (bit % 8);
}

}  // namespace lockstep::comm::detail
