// SPDX-License-Identifier: Apache-2.0
// Which parts of a file are in use. Private: not installed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>

#include "lockstep/memory/disk_file.h"

namespace lockstep::memory::detail {

// A block goes where the first gap is large enough, as direct reads and writes need it.
class FileSpace {
 public:
  size_t take(size_t bytes) {
    const size_t place = DiskFile::rounded(std::max<size_t>(bytes, 1));
    size_t begin = 0;
    for (const auto& [taken_begin, taken_end] : taken_) {
      if (taken_begin - begin >= place) break;
      begin = taken_end;
    }
    taken_.emplace(begin, begin + place);
    return begin;
  }
  void give_back(size_t begin) { taken_.erase(begin); }
  size_t end() const { return taken_.empty() ? 0 : taken_.rbegin()->second; }

 private:
  std::map<size_t, size_t> taken_;  // begin -> end
};

}  // namespace lockstep::memory::detail
