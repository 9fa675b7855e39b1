// SPDX-License-Identifier: Apache-2.0
// Token ids as they lie in memory: little-endian integers of any width, at any address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep::data {

enum class TokenType { uint8, int16, int32, int64, uint16, uint32 };

// Bytes of one token.
int64_t width_of(TokenType type);

// A view: what it shows must outlive it.
class TokenSpan {
 public:
  TokenSpan() = default;
  // Bytes after the last whole token are not seen.
  TokenSpan(std::span<const std::byte> bytes, TokenType type)
      : bytes_(bytes), type_(type), size_(static_cast<int64_t>(bytes.size()) / width_of(type)) {}

  int64_t size() const { return size_; }
  TokenType type() const { return type_; }

  // Copies tokens [begin, begin + out.size()); throws ConfigError where they are not all there.
  void read(int64_t begin, std::span<int64_t> out) const;

  // The largest of tokens [begin, end), -1 if that is empty; throws ConfigError as read() does.
  int64_t max(int64_t begin, int64_t end) const;

 private:
  std::span<const std::byte> bytes_;
  TokenType type_ = TokenType::uint8;
  int64_t size_ = 0;
};

}  // namespace lockstep::data
