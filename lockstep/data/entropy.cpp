// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/entropy.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace lockstep::data {
namespace {

constexpr int64_t kLargestVocab = 65536;

// Calls use(before, token) for every pair of neighbours; false at an id that cannot be counted.
template <class Use>
bool for_each_pair(const Corpus& corpus, int64_t count, Use use) {
  std::vector<int64_t> tokens(static_cast<size_t>(std::min<int64_t>(count, 1 << 16)));
  int64_t before = -1;
  for (int64_t begin = 0; begin < count; begin += static_cast<int64_t>(tokens.size())) {
    tokens.resize(std::min<size_t>(tokens.size(), static_cast<size_t>(count - begin)));
    corpus.read(begin, tokens);
    for (const int64_t token : tokens) {
      if (token < 0 || token >= kLargestVocab) return false;
      if (before >= 0) use(before, token);
      before = token;
    }
  }
  return true;
}

// Sum of -n log(n / total) over the counts, which are of one distribution.
double surprise(int64_t n, int64_t total) {
  return n == 0 ? 0
                : -static_cast<double>(n) *
                      std::log(static_cast<double>(n) / static_cast<double>(total));
}

// Both entropies are over the same tokens, all but the first.
class Counts {
 public:
  explicit Counts(int64_t vocab) : first_(vocab), second_(vocab) {}

  void add_pair(int64_t before, int64_t token, int64_t n) {
    first_[static_cast<size_t>(before)] += n;
    second_[static_cast<size_t>(token)] += n;
    total_ += n;
    pairs_ += n == 0 ? 0 : static_cast<double>(n) * std::log(static_cast<double>(n));
  }

  Entropy result() const {
    double unigram = 0, given = 0;
    for (const int64_t n : second_) unigram += surprise(n, total_);
    // sum n(a, b) log(n(a) / n(a, b)) = sum n(a) log n(a) - sum n(a, b) log n(a, b)
    for (const int64_t n : first_) {
      given += n == 0 ? 0 : static_cast<double>(n) * std::log(static_cast<double>(n));
    }
    const auto total = static_cast<double>(total_);
    return {unigram / total, std::max(0.0, (given - pairs_) / total), total_ + 1};
  }

 private:
  std::vector<int64_t> first_, second_;
  int64_t total_ = 0;
  double pairs_ = 0;
};

Entropy of_bytes(const Corpus& corpus, int64_t count) {
  constexpr int64_t kPairs = 65536;
  std::vector<int64_t> table(kPairs);
  for_each_pair(corpus, count, [&](int64_t before, int64_t token) {
    ++table[static_cast<size_t>(before * 256 + token)];
  });
  Counts counts(256);
  for (int64_t pair = 0; pair < kPairs; ++pair) {
    counts.add_pair(pair / 256, pair % 256, table[static_cast<size_t>(pair)]);
  }
  return counts.result();
}

}  // namespace

std::optional<Entropy> entropy(const Corpus& corpus, int64_t limit_tokens) {
  const int64_t count = std::min(limit_tokens, corpus.size());
  if (count < 2) return std::nullopt;
  const int64_t largest = corpus.max_token(count);
  if (largest < 256) return of_bytes(corpus, count);
  if (largest >= kLargestVocab) return std::nullopt;
  // Equal pairs are neighbours once sorted; a table of 2^32 pairs would be mostly empty.
  std::vector<uint32_t> pairs;
  pairs.reserve(static_cast<size_t>(count));
  if (!for_each_pair(corpus, count, [&](int64_t before, int64_t token) {
        pairs.push_back(static_cast<uint32_t>(before << 16 | token));
      })) {
    return std::nullopt;
  }
  std::sort(pairs.begin(), pairs.end());
  Counts counts(kLargestVocab);
  for (auto run = pairs.begin(); run != pairs.end();) {
    const auto end = std::find_if(run, pairs.end(), [&](uint32_t pair) { return pair != *run; });
    counts.add_pair(*run >> 16, *run & 0xffff, end - run);
    run = end;
  }
  return counts.result();
}

}  // namespace lockstep::data
