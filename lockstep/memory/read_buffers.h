// SPDX-License-Identifier: Apache-2.0
// Memory for what is read from disk. Private: not installed.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>

#include "lockstep/memory/arena.h"

namespace lockstep::memory::detail {

// A few buffers are kept and used again: blocks of a step are mostly of one size. Not from the
// heap, which grows where one thread takes and another gives back. Thread safe; must be in a
// shared_ptr.
class ReadBuffers : public std::enable_shared_from_this<ReadBuffers> {
 public:
  std::shared_ptr<std::byte> take(size_t bytes);

 private:
  // Empty where there is none that fits, without much to spare.
  AddressRange find(size_t bytes);
  void give_back(AddressRange range);

  std::mutex mutex_;
  std::deque<AddressRange> free_;
};

}  // namespace lockstep::memory::detail
