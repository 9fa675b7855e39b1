// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/infer/text_stream.h"

#include <algorithm>
#include <cstddef>

namespace lockstep::cli {
namespace {

// Bytes at the end that begin a character of UTF-8 whose rest is missing.
size_t unfinished(std::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xC0) == 0x80) continue;  // in the middle of one
    const size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
    return length > back ? back : 0;
  }
  return 0;
}

}  // namespace

std::string TextStream::show(size_t count) {
  std::string shown = held_.substr(0, count);
  held_.erase(0, count);
  text_ += shown;
  return shown;
}

std::string TextStream::push(std::string_view bytes) {
  if (stopped_) return {};
  held_ += bytes;
  size_t end = std::string::npos, held = 0;
  for (const std::string& stop : stops_) {
    end = std::min(end, held_.find(stop));
    // The longest end of the text that a stop text begins with.
    for (size_t size = std::min(stop.size() - 1, held_.size()); size > held; --size) {
      if (std::string_view(held_).substr(held_.size() - size) ==
          std::string_view(stop).substr(0, size))
        held = size;
    }
  }
  if (end != std::string::npos) {
    stopped_ = true;
    std::string shown = show(end);
    held_.clear();
    return shown;
  }
  return show(held_.size() - std::max(held, unfinished(held_)));
}

std::string TextStream::finish() { return show(held_.size()); }

}  // namespace lockstep::cli
