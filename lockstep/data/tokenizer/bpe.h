// SPDX-License-Identifier: Apache-2.0
// Byte-pair encoding of one word: single bytes or characters, then the pair with the lowest rank is
// merged, the leftmost of equals, until no pair is left that has a rank.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace lockstep::data {

struct Merge {
  int32_t left, right, merged;
};

// A table from two tokens to the rank of their merge. Lookups touch one or two cache lines.
class MergeTable {
 public:
  // Ranks are indices into `merges`; of two merges of one pair the later counts.
  explicit MergeTable(const std::vector<Merge>& merges);

  struct Entry {
    uint64_t pair = ~uint64_t{0};
    uint32_t rank = kNone;
    int32_t merged = 0;
  };
  static constexpr uint32_t kNone = ~uint32_t{0};
  // rank is kNone where the pair does not merge.
  Entry find(int32_t left, int32_t right) const;

 private:
  size_t slot_of(uint64_t pair) const;

  std::vector<Entry> slots_;  // a power of two, at most half of them in use
};

// Tokens of words seen before. Constant size: a word displaces the one in its place.
class WordCache {
 public:
  static constexpr size_t kMaxBytes = 22, kMaxTokens = 10;

  struct Slot {
    uint8_t num_bytes = 0, num_tokens = 0;
    char bytes[kMaxBytes];
    int32_t tokens[kMaxTokens];
  };
  // The word's place. The word is there only if holds() says so.
  Slot& slot_of(std::string_view word);
  static bool holds(const Slot& slot, std::string_view word);
  static void store(Slot& slot, std::string_view word, const int32_t* tokens, size_t num_tokens);

 private:
  static constexpr size_t kNumSlots = 1 << 15;
  std::vector<Slot> slots_ = std::vector<Slot>(kNumSlots);
};

// Immutable: threads share one, each with a Workspace of its own.
class Bpe {
 public:
  struct Workspace {
    struct Symbol {
      int32_t token, previous, next;  // next is -1 at the end; token is -1 once merged away
    };
    struct Candidate {
      uint32_t rank;
      int32_t position, merged;
    };
    WordCache cache;
    std::vector<Symbol> symbols;
    std::vector<Candidate> queue;
  };

  struct Model {
    std::array<int32_t, 256> byte_tokens{};
    // Characters that a word begins as, with the bytes of those that are not here; empty: bytes.
    std::unordered_map<uint32_t, int32_t> character_tokens;
    std::vector<Merge> merges;
    // Words that are one token whatever the merges say (ignore_merges).
    std::unordered_map<std::string, int32_t> whole_words;
  };
  explicit Bpe(Model model);

  // Appends the tokens of the word.
  void encode(std::string_view word, Workspace& workspace, std::vector<int32_t>& tokens) const;

 private:
  void merge(std::string_view word, Workspace& workspace, std::vector<int32_t>& tokens) const;
  void push_pair(int32_t position, Workspace& workspace) const;
  // The symbols that the word begins as.
  void cut(std::string_view word, std::vector<Workspace::Symbol>& symbols) const;

  std::array<int32_t, 256> byte_tokens_;
  std::unordered_map<uint32_t, int32_t> character_tokens_;
  MergeTable merges_;
  std::unordered_map<std::string, int32_t> whole_words_;
};

}  // namespace lockstep::data
