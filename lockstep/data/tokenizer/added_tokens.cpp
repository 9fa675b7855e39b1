// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokenizer/added_tokens.h"

#include <algorithm>
#include <utility>

namespace lockstep::data {

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::sort(tokens_.begin(), tokens_.end(),
            [](const auto& a, const auto& b) { return a.content < b.content; });
  for (const auto& token : tokens_) {
    begins_[static_cast<unsigned char>(token.content[0])] = true;
    // What begins a token stands before it, and so does all that begins its neighbour and it.
    int shorter = static_cast<int>(shorter_.size()) - 1;
    while (shorter >= 0 && !token.content.starts_with(tokens_[shorter].content)) {
      shorter = shorter_[shorter];
    }
    shorter_.push_back(shorter);
  }
}

std::optional<AddedTokens::Found> AddedTokens::find(std::string_view text, size_t from) const {
  if (tokens_.empty()) return std::nullopt;
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!begins_[static_cast<unsigned char>(text[begin])]) continue;
    // Every token that begins the rest also begins the last token that is not above the rest.
    const auto rest = text.substr(begin);
    const auto above =
        std::upper_bound(tokens_.begin(), tokens_.end(), rest,
                         [](std::string_view a, const auto& b) { return a < b.content; });
    int last = static_cast<int>(above - tokens_.begin()) - 1;
    while (last >= 0 && !rest.starts_with(tokens_[last].content)) last = shorter_[last];
    if (last >= 0) return Found{begin, begin + tokens_[last].content.size(), tokens_[last].id};
  }
  return std::nullopt;
}

}  // namespace lockstep::data
