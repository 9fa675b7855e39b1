// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/activity_reporter.h"

#include <exception>

#include "lockstep/comm/backend.h"

namespace lockstep::comm::detail {

ActivityReporter::ActivityReporter(std::shared_ptr<launch::Store> store)
    : store_(std::move(store)), thread_([this](std::stop_token stop) { run(std::move(stop)); }) {}

ActivityReporter::~ActivityReporter() = default;

ActivityReporter::Word ActivityReporter::watch(const std::string& key) {
  auto word = std::make_shared<std::atomic<uint64_t>>(0);
  const std::lock_guard lock(mutex_);
  words_[key] = {word, 0};
  return word;
}

void ActivityReporter::run(std::stop_token stop) {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, stop, kInterval, [&] { return stop.stop_requested(); })) {
    std::map<std::string, uint64_t> news;
    std::erase_if(words_, [](const auto& item) { return item.second.first.expired(); });
    for (auto& [key, entry] : words_) {
      const auto word = entry.first.lock();
      const uint64_t value = word ? word->load(std::memory_order_relaxed) : entry.second;
      if (value != entry.second) news[key] = entry.second = value;
    }
    lock.unlock();
    try {
      for (const auto& [key, value] : news) store_->set(key, std::to_string(value));
    } catch (const std::exception&) {
      return;  // the rendezvous is gone; who waits finds that out by itself
    }
    lock.lock();
  }
}

const std::shared_ptr<ActivityReporter>& reporter_of(World& world) {
  if (!world.reporter) world.reporter = std::make_shared<ActivityReporter>(world.store);
  return world.reporter;
}

}  // namespace lockstep::comm::detail
