// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokenizer/normalizer.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <unordered_map>

#include "lockstep/data/tokenizer/nfc_table.h"
#include "lockstep/data/tokenizer/utf8.h"

namespace lockstep::data {
namespace {

constexpr uint32_t kMask = (1u << 21) - 1;
constexpr size_t kPieceChars = 4096;  // characters that are normalized together, about

// Hangul syllables: leading and trailing consonants (L, T) and vowels (V) by number.
constexpr uint32_t kSyllables = 0xac00, kL = 0x1100, kV = 0x1161, kT = 0x11a7;
constexpr uint32_t kNumL = 19, kNumV = 21, kNumT = 28;

bool is_syllable(uint32_t c) { return c - kSyllables < kNumL * kNumV * kNumT; }

int combining_class(uint32_t c) {
  const auto classes = nfc_table().classes;
  const auto after = std::ranges::upper_bound(classes, c << 8 | 0xff);
  return after == classes.begin() ? 0 : static_cast<int>(*std::prev(after) & 0xff);
}

void decompose(uint32_t c, std::u32string& out) {
  if (is_syllable(c)) {
    const uint32_t index = c - kSyllables, t = index % kNumT;
    out += static_cast<char32_t>(kL + index / (kNumV * kNumT));
    out += static_cast<char32_t>(kV + index / kNumT % kNumV);
    if (t > 0) out += static_cast<char32_t>(kT + t);
    return;
  }
  const auto pairs = nfc_table().pairs;
  const auto pair =
      std::ranges::lower_bound(pairs, c, {}, [](uint64_t entry) { return entry >> 42 & kMask; });
  if (pair != pairs.end() && (*pair >> 42 & kMask) == c) {
    decompose(*pair >> 21 & kMask, out);
    out += static_cast<char32_t>(*pair & kMask);  // never decomposes further
    return;
  }
  const auto singles = nfc_table().singles;
  const auto single =
      std::ranges::lower_bound(singles, c, {}, [](uint64_t entry) { return entry >> 21; });
  if (single != singles.end() && *single >> 21 == c) return decompose(*single & kMask, out);
  out += static_cast<char32_t>(c);
}

// 0 where the two do not compose.
uint32_t composed(uint32_t first, uint32_t second) {
  if (first - kL < kNumL && second - kV < kNumV) {
    return kSyllables + ((first - kL) * kNumV + (second - kV)) * kNumT;
  }
  if (is_syllable(first) && (first - kSyllables) % kNumT == 0 && second - kT - 1 < kNumT - 1) {
    return first + (second - kT);
  }
  static const std::unordered_map<uint64_t, uint32_t> kComposites = [] {
    std::unordered_map<uint64_t, uint32_t> map;
    for (const uint64_t pair : nfc_table().pairs) {
      if (pair >> 63 != 0) map[pair & ((uint64_t{1} << 42) - 1)] = pair >> 42 & kMask;
    }
    return map;
  }();
  const auto found = kComposites.find(uint64_t{first} << 21 | second);
  return found == kComposites.end() ? 0 : found->second;
}

// Characters with a class above 0 in the order of their classes, up to the next with class 0.
void reorder(std::u32string& text) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (combining_class(text[i]) == 0) continue;
    size_t end = i;
    while (end < text.size() && combining_class(text[end]) != 0) ++end;
    std::stable_sort(
        text.begin() + static_cast<long>(i), text.begin() + static_cast<long>(end),
        [](char32_t a, char32_t b) { return combining_class(a) < combining_class(b); });
    i = end;
  }
}

// Each character joins the last one with class 0 before it, unless one between them that stays has
// a class that is not below its own.
void compose(std::u32string& text) {
  constexpr size_t kNone = ~size_t{0};
  std::u32string out;
  size_t starter = kNone;  // index in `out`
  int last_class = -1;     // of what stands after the starter; -1: nothing does
  for (const char32_t c : text) {
    const int cc = combining_class(c);
    if (starter != kNone && last_class < cc) {
      if (const uint32_t joined = composed(out[starter], c)) {
        out[starter] = static_cast<char32_t>(joined);
        continue;
      }
    }
    if (cc == 0) {
      starter = out.size();
      last_class = -1;
    } else {
      last_class = cc;
    }
    out += c;
  }
  text = std::move(out);
}

std::string replaced(std::string_view text, const NormalizerStep& step) {
  std::string out;
  while (true) {
    const size_t at = text.find(step.pattern);
    out += text.substr(0, at);
    if (at == std::string_view::npos) return out;
    out += step.content;
    text.remove_prefix(at + step.pattern.size());
  }
}

}  // namespace

std::string to_nfc(std::string_view text) {
  // Below U+0300, whose first byte is 0xcc, nothing combines: most text needs no more than this.
  const auto may_change = [](char c) { return static_cast<unsigned char>(c) >= 0xcc; };
  if (std::ranges::none_of(text, may_change)) return std::string(text);
  std::string out;
  std::u32string run;  // of characters that are valid
  const auto finish = [&] {
    reorder(run);
    compose(run);
    for (const char32_t c : run) append_utf8(out, c);
    run.clear();
  };
  for (size_t at = 0; at < text.size();) {
    if (const auto c = utf8_at(text, at)) {
      // Nothing before an ASCII character combines with it: a long text goes in pieces.
      if (c->code_point < 0x80 && run.size() >= kPieceChars) finish();
      decompose(c->code_point, run);
      at += c->size;
    } else {
      finish();
      out += text[at++];
    }
  }
  finish();
  return out;
}

std::string normalize(std::string_view text, const std::vector<NormalizerStep>& steps) {
  std::string result(text);
  for (const NormalizerStep& step : steps) {
    switch (step.kind) {
      case NormalizerStep::Kind::nfc:
        result = to_nfc(result);
        break;
      case NormalizerStep::Kind::prepend:
        if (!result.empty()) result.insert(0, step.content);
        break;
      case NormalizerStep::Kind::replace:
        result = replaced(result, step);
        break;
    }
  }
  return result;
}

}  // namespace lockstep::data
