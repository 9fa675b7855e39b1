// SPDX-License-Identifier: Apache-2.0
// Finds tokens that stand in the text as they are, before anything else is done to it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

struct AddedToken {
  std::string content;  // not empty
  int32_t id;
};

class AddedTokens {
 public:
  AddedTokens() = default;
  // Contents differ.
  explicit AddedTokens(std::vector<AddedToken> tokens);

  struct Found {
    size_t begin, end;
    int32_t id;
  };
  // The leftmost one at or after `from`; the longest of those that begin there.
  std::optional<Found> find(std::string_view text, size_t from) const;

 private:
  std::vector<AddedToken> tokens_;  // sorted by content
  std::vector<int> shorter_;        // the longest other token that begins this one; -1 for none
  std::array<bool, 256> begins_{};  // bytes that a token begins with
};

}  // namespace lockstep::data
