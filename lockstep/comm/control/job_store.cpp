// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/job_store.h"

#include "lockstep/comm/backend.h"
#include "lockstep/comm/control/activity_reporter.h"

namespace lockstep::comm {

launch::Store& job_store(const Group& group) {
  return *detail::impl_of(group).membership().world->store;
}

PublishedWord publish_word(const Group& group, const std::string& key) {
  return detail::reporter_of(*detail::impl_of(group).membership().world)->watch(key);
}

std::optional<uint64_t> find_word(const Group& group, const std::string& key) {
  const auto text = job_store(group).find(key);
  return text ? std::optional<uint64_t>(std::stoull(*text)) : std::nullopt;
}

}  // namespace lockstep::comm
