// SPDX-License-Identifier: Apache-2.0
// The job's store, for what ranks tell each other outside of operations. Private: not installed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/launch/rendezvous/store.h"

namespace lockstep::comm {

// The key-value store that all ranks of the group's job share. A default-constructed group has
// none.
launch::Store& job_store(const Group& group);

// A number that this rank publishes under `key` in the job's store: write to it, and a thread posts
// the newest value a few times a second. Posting ends when the caller drops it. The caller keeps
// the group.
using PublishedWord = std::shared_ptr<std::atomic<uint64_t>>;
PublishedWord publish_word(const Group& group, const std::string& key);

// The value that some rank has published under `key`; none if it has not yet.
std::optional<uint64_t> find_word(const Group& group, const std::string& key);

}  // namespace lockstep::comm
