// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/rendezvous/store.h"

#include <charconv>
#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::launch {

std::string lost_key(int rank) { return format("lost/{}", rank); }

std::string join_result(const std::string& value) {
  std::istringstream words(value);
  std::string kind, text;
  int number = -1;
  words >> kind;
  if (kind == "lost") words >> number;
  std::getline(words.ignore(), text, '\0');
  if (kind == "met") return text;
  if (kind == "refused") throw ConfigError(text);
  if (kind == "lost") throw PeerLost(number, text);
  throw TimeoutError(text);
}

void LocalStore::set(const std::string& key, const std::string& value) {
  const std::lock_guard lock(mutex_);
  values_[key] = value;
  changed_.notify_all();
}

std::string LocalStore::get(const std::string& key, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, deadline.at(), [&] { return values_.contains(key); })) {
    throw TimeoutError(format("no rank set '{}' before the deadline", key));
  }
  return values_.at(key);
}

std::optional<std::string> LocalStore::find(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  return found == values_.end() ? std::nullopt : std::optional(found->second);
}

int64_t LocalStore::add(const std::string& key, int64_t amount) {
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  int64_t old = 0, sum = 0;
  if (found != values_.end()) {
    const std::string& text = found->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), old);
    if (error != std::errc() || end != text.data() + text.size()) {
      throw ConfigError(format("add to '{}': its value is not a whole number", key));
    }
  }
  if (__builtin_add_overflow(old, amount, &sum)) {
    throw ConfigError(format("add to '{}': {} + {} does not fit 64 bits", key, old, amount));
  }
  values_[key] = std::to_string(sum);
  changed_.notify_all();
  return sum;
}

bool LocalStore::remove(const std::string& key) {
  const std::lock_guard lock(mutex_);
  return values_.erase(key) > 0;
}

}  // namespace lockstep::launch
