// SPDX-License-Identifier: Apache-2.0
// Where recompute() keeps the inputs of functions, in place of memory.
//
//   auto store = std::make_shared<parallel::ActivationStore>("/scratch");
//   x = parallel::recompute(block, x, {.store = store});
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "lockstep/memory/disk_store.h"

namespace lockstep::parallel {

namespace detail {
class StoredInputs;
}

// Tensors on disk between forward and backward, one store for all functions of a rank. They are
// read ahead of use: in the order of the step before and, where there is none, last in first out.
// A wrong guess costs time, nothing else. Thread safe.
class ActivationStore {
 public:
  // ConfigError unless a file can be made in `folder`. The file has no name: nothing is left.
  explicit ActivationStore(const std::string& folder, memory::DiskStoreOptions options = {});

  memory::DiskStoreStats stats() const { return disk_.stats(); }

 private:
  friend class detail::StoredInputs;

  int64_t add(detail::StoredInputs* inputs);
  void remove(int64_t number);
  void read_ahead(int64_t number);
  // What will be wanted after `number`, if all goes as before.
  std::optional<int64_t> guess(int64_t number) const;

  memory::DiskStore disk_;
  std::mutex mutex_;
  // Numbered as they are put; from 0 again when all are gone, so that those of equal steps have
  // equal numbers.
  std::map<int64_t, detail::StoredInputs*> kept_;
  int64_t next_ = 0;
  std::optional<int64_t> last_wanted_;
  std::unordered_map<int64_t, int64_t> after_;  // wanted one after the other
};

}  // namespace lockstep::parallel
