// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/data/tokenizer/utf8.h"

namespace lockstep::data {
namespace {

uint64_t pair_of(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

// For the heap functions of the standard library, which keep the largest in front.
bool comes_later(const Bpe::Workspace::Candidate& a, const Bpe::Workspace::Candidate& b) {
  return std::pair(a.rank, a.position) > std::pair(b.rank, b.position);
}

}  // namespace

// ---- merge table ----

MergeTable::MergeTable(const std::vector<Merge>& merges)
    : slots_(std::bit_ceil(2 * merges.size() + 1)) {
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const uint64_t pair = pair_of(merges[rank].left, merges[rank].right);
    slots_[slot_of(pair)] = {pair, static_cast<uint32_t>(rank), merges[rank].merged};
  }
}

size_t MergeTable::slot_of(uint64_t pair) const {
  // Fibonacci hashing: the product's upper bits depend on every bit of the pair.
  size_t slot = (pair * 0x9e3779b97f4a7c15u) >> 32 & (slots_.size() - 1);
  while (slots_[slot].rank != kNone && slots_[slot].pair != pair) {
    slot = (slot + 1) & (slots_.size() - 1);
  }
  return slot;
}

MergeTable::Entry MergeTable::find(int32_t left, int32_t right) const {
  return slots_[slot_of(pair_of(left, right))];
}

// ---- word cache ----

WordCache::Slot& WordCache::slot_of(std::string_view word) {
  return slots_[std::hash<std::string_view>()(word) % kNumSlots];
}

bool WordCache::holds(const Slot& slot, std::string_view word) {
  return slot.num_bytes == word.size() && std::memcmp(slot.bytes, word.data(), word.size()) == 0;
}

void WordCache::store(Slot& slot, std::string_view word, const int32_t* tokens, size_t num_tokens) {
  if (word.size() > kMaxBytes || num_tokens > kMaxTokens) return;
  slot.num_bytes = static_cast<uint8_t>(word.size());
  slot.num_tokens = static_cast<uint8_t>(num_tokens);
  std::copy(word.begin(), word.end(), slot.bytes);
  std::copy(tokens, tokens + num_tokens, slot.tokens);
}

// ---- one word ----

Bpe::Bpe(Model model)
    : byte_tokens_(model.byte_tokens),
      character_tokens_(std::move(model.character_tokens)),
      merges_(model.merges),
      whole_words_(std::move(model.whole_words)) {}

void Bpe::encode(std::string_view word, Workspace& workspace, std::vector<int32_t>& tokens) const {
  if (word.empty()) return;
  auto& slot = workspace.cache.slot_of(word);
  if (WordCache::holds(slot, word)) {
    tokens.insert(tokens.end(), slot.tokens, slot.tokens + slot.num_tokens);
    return;
  }
  const size_t before = tokens.size();
  const auto whole =
      whole_words_.empty() ? whole_words_.end() : whole_words_.find(std::string(word));
  if (whole != whole_words_.end()) {
    tokens.push_back(whole->second);
  } else {
    merge(word, workspace, tokens);
  }
  WordCache::store(slot, word, tokens.data() + before, tokens.size() - before);
}

void Bpe::push_pair(int32_t position, Workspace& workspace) const {
  const auto& left = workspace.symbols[position];
  const auto entry = merges_.find(left.token, workspace.symbols[left.next].token);
  if (entry.rank == MergeTable::kNone) return;
  workspace.queue.push_back({entry.rank, position, entry.merged});
  std::push_heap(workspace.queue.begin(), workspace.queue.end(), comes_later);
}

void Bpe::cut(std::string_view word, std::vector<Workspace::Symbol>& symbols) const {
  const auto add = [&](int32_t token) {
    const auto index = static_cast<int32_t>(symbols.size());
    symbols.push_back({token, index - 1, index + 1});
  };
  for (size_t i = 0; i < word.size();) {
    size_t size = 1;
    if (!character_tokens_.empty()) {
      const auto character = utf8_at(word, i);
      if (character) {
        size = character->size;
        const auto found = character_tokens_.find(character->code_point);
        if (found != character_tokens_.end()) {
          add(found->second);
          i += size;
          continue;
        }
      }
    }
    for (const size_t end = i + size; i < end; ++i)
      add(byte_tokens_[static_cast<unsigned char>(word[i])]);
  }
}

// Symbols are a linked list in an array, so that positions in the queue stay valid. A merge puts
// the new pairs into the queue and leaves the old ones there: an entry whose pair no longer merges
// to what it says is skipped.
void Bpe::merge(std::string_view word, Workspace& workspace, std::vector<int32_t>& tokens) const {
  auto& symbols = workspace.symbols;
  auto& queue = workspace.queue;
  symbols.clear();
  queue.clear();
  if (word.size() > INT32_MAX) {
    throw ConfigError(
        format("tokenizer: a word of {} bytes, at most {} can be encoded", word.size(), INT32_MAX));
  }
  cut(word, symbols);
  const auto size = static_cast<int32_t>(symbols.size());
  symbols.back().next = -1;
  for (int32_t i = 0; i + 1 < size; ++i) push_pair(i, workspace);

  while (!queue.empty()) {
    const auto best = queue.front();
    std::pop_heap(queue.begin(), queue.end(), comes_later);
    queue.pop_back();
    auto& left = symbols[best.position];
    if (left.token < 0 || left.next < 0) continue;
    auto& right = symbols[left.next];
    const auto entry = merges_.find(left.token, right.token);
    if (entry.rank == MergeTable::kNone || entry.merged != best.merged) continue;

    left.token = best.merged;
    left.next = right.next;
    right.token = -1;
    if (left.next >= 0) symbols[left.next].previous = best.position;
    if (left.previous >= 0) push_pair(left.previous, workspace);
    if (left.next >= 0) push_pair(best.position, workspace);
  }
  for (int32_t i = 0; i >= 0; i = symbols[i].next) tokens.push_back(symbols[i].token);
}

}  // namespace lockstep::data
