// SPDX-License-Identifier: Apache-2.0
// Token ids in memory or in a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/input_file.h"
#include "lockstep/data/tokens/token_span.h"

namespace lockstep::data {

// Moved, not copied. May be read by several threads. Files are read, not mapped: one that has
// shrunk is a DataError with its name.
class TokenSource {
 public:
  TokenSource(std::vector<std::byte> tokens, TokenType type);
  // The bytes of the file from `begin` on.
  TokenSource(InputFile file, uint64_t begin, TokenType type);

  int64_t size() const { return size_; }
  TokenType type() const { return type_; }
  bool in_file() const { return in_file_; }
  // What it was opened with stays open only until this; then it is opened for each read.
  void close() { file_.close(); }

  // As TokenSpan's.
  void read(int64_t begin, std::span<int64_t> out) const;
  int64_t max(int64_t begin, int64_t end) const;
  // Where this token is.
  std::vector<int64_t> find(int64_t token) const;

 private:
  // Calls `use` with one span after another that together are the tokens [begin, end).
  template <class Use>
  void for_each(int64_t begin, int64_t end, Use use) const;

  std::vector<std::byte> memory_;
  InputFile file_;
  uint64_t begin_ = 0;
  bool in_file_ = false;
  TokenType type_;
  int64_t size_ = 0;
};

}  // namespace lockstep::data
