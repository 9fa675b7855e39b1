// SPDX-License-Identifier: Apache-2.0
// One parallel loop over many arrays, in blocks that do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep::optim::detail {

struct Block {
  int64_t array;       // in the order of add()
  int64_t begin, end;  // elements of it
  int64_t index;       // among all blocks
};

class Blocks {
 public:
  static constexpr int64_t kElements = 16384;  // of a block; the last of an array may be shorter

  void add(int64_t elements);
  int64_t size() const { return size_; }

  // Calls `body` once for every block, on torch's threads: each has a contiguous run of about as
  // many elements, so small arrays do not cost a start of the threads each. `body` must not touch
  // tensors, only their memory.
  void for_each(const std::function<void(const Block&)>& body) const;

 private:
  struct Array {
    int64_t first_element, first_block, elements;
  };
  // Blocks whose first element, counted over all arrays, is in [begin, end).
  void run(int64_t begin, int64_t end, const std::function<void(const Block&)>& body) const;

  std::vector<Array> arrays_;
  int64_t elements_ = 0;
  int64_t size_ = 0;
};

}  // namespace lockstep::optim::detail
