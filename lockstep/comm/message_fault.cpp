// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/message_fault.h"

#include <charconv>
#include <cstdlib>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/flight/fault_text.h"

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
  std::shared_ptr<MessageFault> found;
  for (const flight::FaultText& fault : flight::parse_fault_texts(text)) {
    if (!fault.has("message")) continue;
    constexpr std::string_view kFlip = "flip:";
    const std::string action = fault.value("action");
    if (fault.repeats || fault.values.size() != 3 || !action.starts_with(kFlip)) refuse(fault.text);
    const uint64_t whose = number_in(fault.value("rank"), fault.text);
    const uint64_t message = number_in(fault.value("message"), fault.text);
    const uint64_t bit = number_in(action.substr(kFlip.size()), fault.text);
    if (message == 0) refuse(fault.text);
    if (whose != static_cast<uint64_t>(rank)) continue;
    found = std::make_shared<MessageFault>();
    found->message_ = message;
    found->bit_ = bit;
  }
  return found;
}

std::shared_ptr<MessageFault> MessageFault::from_environment(int rank) {
  const char* const text = std::getenv(flight::kFaultVariable);
  return text == nullptr ? nullptr : parse(text, rank);
}

void MessageFault::apply(std::span<std::byte> piece) {
  if (piece.empty() || ++arrived_ != message_) return;
  const uint64_t bit = bit_ % (piece.size() * 8);
  piece[bit / 8] ^= std::byte{1} << (bit % 8);
}

}  // namespace lockstep::comm::detail
