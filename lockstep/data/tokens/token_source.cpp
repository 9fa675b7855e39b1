// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokens/token_source.h"

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::data {
namespace {

constexpr int64_t kReadBytes = int64_t{1}
                               << 18;  // bytes that are read at a time: they stay in a cache

}  // namespace

TokenSource::TokenSource(std::vector<std::byte> tokens, TokenType type)
    : memory_(std::move(tokens)), type_(type), size_(TokenSpan(memory_, type).size()) {}

TokenSource::TokenSource(InputFile file, uint64_t begin, TokenType type)
    : file_(std::move(file)),
      begin_(begin),
      in_file_(true),
      type_(type),
      size_(static_cast<int64_t>(file_.size() - begin) / width_of(type)) {}

template <class Use>
void TokenSource::for_each(int64_t begin, int64_t end, Use use) const {
  if (begin < 0 || begin > end || end > size_) {
    throw ConfigError(format("tokens [{}, {}) must lie in [0, {})", begin, end, size_));
  }
  const int64_t width = width_of(type_);
  if (!in_file_) {
    const auto bytes = std::span(memory_).subspan(static_cast<size_t>(begin * width),
                                                  static_cast<size_t>((end - begin) * width));
    return use(TokenSpan(bytes, type_));
  }
  std::vector<std::byte> bytes;
  while (begin < end) {
    const int64_t count = std::min(end - begin, kReadBytes / width);
    bytes.resize(static_cast<size_t>(count * width));
    file_.read(begin_ + static_cast<uint64_t>(begin * width), bytes);
    use(TokenSpan(bytes, type_));
    begin += count;
  }
}

void TokenSource::read(int64_t begin, std::span<int64_t> out) const {
  for_each(begin, begin + static_cast<int64_t>(out.size()), [&](const TokenSpan& tokens) {
    const auto count = static_cast<size_t>(tokens.size());
    tokens.read(0, out.first(count));
    out = out.subspan(count);
  });
}

int64_t TokenSource::max(int64_t begin, int64_t end) const {
  int64_t largest = -1;
  for_each(begin, end, [&](const TokenSpan& tokens) {
    largest = std::max(largest, tokens.max(0, tokens.size()));
  });
  return largest;
}

std::vector<int64_t> TokenSource::find(int64_t token) const {
  std::vector<int64_t> places, values;
  int64_t begin = 0;
  for_each(0, size_, [&](const TokenSpan& tokens) {
    for (int64_t done = 0; done < tokens.size(); done += kReadBytes) {
      values.resize(static_cast<size_t>(std::min(kReadBytes, tokens.size() - done)));
      tokens.read(done, values);
      for (auto at = values.begin(); (at = std::find(at, values.end(), token)) != values.end();)
        places.push_back(begin + done + (at++ - values.begin()));
    }
    begin += tokens.size();
  });
  return places;
}

}  // namespace lockstep::data
