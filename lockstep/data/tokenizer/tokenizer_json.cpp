// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokenizer/tokenizer_json.h"

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/data/tokenizer/utf8.h"
#include "lockstep/io/json.h"

namespace lockstep::data {
namespace {

using Vocabulary = std::unordered_map<std::string, int32_t>;

// Above any vocabulary; an id is also an index.
constexpr int64_t kMaxId = 1 << 24;

// GPT-2's alphabet: each byte as a printable character, below U+0144. The bytes that are printable
// in Latin-1 are themselves, the others follow from U+0100 on.
constexpr uint32_t kAlphabetEnd = 256 + 68;
constexpr std::array<uint32_t, 256> kCharacterOfByte = [] {
  std::array<uint32_t, 256> characters{};
  uint32_t next = 256;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    characters[byte] = printable ? byte : next++;
  }
  return characters;
}();

// Of a text in that alphabet; nullopt where it has another character. JSON is valid UTF-8.
std::optional<std::string> bytes_of_alphabet(const std::string& text) {
  static constexpr auto kByteOfCharacter = [] {
    std::array<int, kAlphabetEnd> bytes{};
    bytes.fill(-1);
    for (int byte = 0; byte < 256; ++byte) bytes[kCharacterOfByte[byte]] = byte;
    return bytes;
  }();
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    auto character = static_cast<uint32_t>(static_cast<unsigned char>(text[i]));
    if (character >= 0xe0) return std::nullopt;
    if (character >= 0x80) {
      character = (character & 0x1f) << 6 | (static_cast<unsigned char>(text[++i]) & 0x3f);
    }
    if (character >= kAlphabetEnd || kByteOfCharacter[character] < 0) return std::nullopt;
    bytes += static_cast<char>(kByteOfCharacter[character]);
  }
  return bytes;
}

// The tokens that SentencePiece has for bytes: <0x00> to <0xFF>.
std::string fallback_of_byte(int byte) {
  constexpr const char* kDigits = "0123456789ABCDEF";
  return format("<0x{}{}>", kDigits[byte >> 4], kDigits[byte & 15]);
}
std::optional<int> byte_of_fallback(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x")) return std::nullopt;
  for (int byte = 0; byte < 256; ++byte) {
    if (token == fallback_of_byte(byte)) return byte;
  }
  return std::nullopt;
}

// For messages: short, one line, ASCII.
std::string shown(const io::Json& value) {
  auto text = value.dump(-1, ' ', true);
  if (text.size() > 300) text = text.substr(0, 300) + "...";
  return text;
}

class Reader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)) {}

  TokenizerJson read() {
    io::Json root;
    try {
      root = io::parse_json(read_text(path_, io::kMaxJsonBytes), path_);
    } catch (const CheckpointError& failure) {
      throw ConfigError(format("tokenizer {}", failure.what()));
    }
    if (!root.is_object()) refuse("the file", root, "an object");
    if (get(root, "model").is_null()) {
      fail("is not a tokenizer.json: it has no \"model\"; name the tokenizer.json of the model");
    }
    read_normalizer(get(root, "normalizer"));
    const io::Json& pre_tokenizer = get(root, "pre_tokenizer");
    read_pre_tokenizer(pre_tokenizer);
    const io::Json& model = get(root, "model");
    if (!byte_level_ && !read_bool(model, "model", "byte_fallback", false)) {
      refuse("pre_tokenizer", pre_tokenizer, kPreTokenizers);
    }
    read_model(model);
    read_added_tokens(get(root, "added_tokens"));
    return std::move(result_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError(format("tokenizer {}: {}", path_, what));
  }
  [[noreturn]] void refuse(const std::string& key, const io::Json& value,
                           const std::string& supported) const {
    fail(format("{} is {}; supported: {}", key, shown(value), supported));
  }

  // Null where the key is missing or the value is not an object.
  static const io::Json& get(const io::Json& object, const char* key) {
    static const io::Json null;
    const auto found = object.find(key);
    return found == object.end() ? null : *found;
  }

  bool read_bool(const io::Json& object, const std::string& parent, const char* key,
                 bool otherwise) const {
    const io::Json& value = get(object, key);
    if (value.is_null()) return otherwise;
    if (!value.is_boolean()) refuse(format("{}.{}", parent, key), value, "true, false");
    return value.get<bool>();
  }

  void read_normalizer(const io::Json& normalizer) {
    if (normalizer.is_null()) return;
    const io::Json& steps = get(normalizer, "normalizers");
    if (get(normalizer, "type") == "Sequence" && steps.is_array()) {
      for (const io::Json& step : steps) read_normalizer(step);
      return;
    }
    using Kind = NormalizerStep::Kind;
    const io::Json &type = get(normalizer, "type"), &prepend = get(normalizer, "prepend");
    const io::Json& pattern = get(get(normalizer, "pattern"), "String");
    const io::Json& content = get(normalizer, "content");
    if (type == "NFC") {
      result_.normalizer.push_back({Kind::nfc});
    } else if (type == "Prepend" && prepend.is_string()) {
      result_.normalizer.push_back({Kind::prepend, {}, prepend.get<std::string>()});
    } else if (type == "Replace" && pattern.is_string() && pattern != "" && content.is_string()) {
      result_.normalizer.push_back(
          {Kind::replace, pattern.get<std::string>(), content.get<std::string>()});
    } else {
      refuse("normalizer", normalizer,
             "null, NFC, Prepend, Replace of a String, a Sequence of these");
    }
  }

  void read_pre_tokenizer(const io::Json& pre_tokenizer) {
    const char* const supported = kPreTokenizers;
    const io::Json& type = get(pre_tokenizer, "type");
    if (pre_tokenizer.is_null() || type == "Metaspace") {
      byte_level_ = false;
      if (!pre_tokenizer.is_null()) read_metaspace(pre_tokenizer);
      return;
    }
    if (type != "Sequence") {
      if (type != "ByteLevel") refuse("pre_tokenizer", pre_tokenizer, supported);
      return read_byte_level(pre_tokenizer);
    }
    const io::Json& steps = get(pre_tokenizer, "pretokenizers");
    if (!steps.is_array() || steps.empty() || steps.size() > 2 ||
        get(steps.back(), "type") != "ByteLevel") {
      refuse("pre_tokenizer", pre_tokenizer, supported);
    }
    read_byte_level(steps.back());
    if (steps.size() == 1) return;
    if (get(steps[0], "type") != "Split") refuse("pre_tokenizer", pre_tokenizer, supported);
    if (result_.pattern != WordPattern::whole || result_.prefix_space != PrefixSpace::never) {
      refuse("pre_tokenizer ByteLevel", steps[1],
             "use_regex and add_prefix_space false after a Split");
    }
    read_split(steps[0]);
  }

  void read_byte_level(const io::Json& byte_level) {
    const char* const key = "pre_tokenizer ByteLevel";
    if (read_bool(byte_level, key, "add_prefix_space", true)) {
      result_.prefix_space = PrefixSpace::always;
    }
    const bool use_regex = read_bool(byte_level, key, "use_regex", true);
    result_.pattern = use_regex ? WordPattern::gpt2 : WordPattern::whole;
  }

  void read_metaspace(const io::Json& metaspace) {
    const char* const key = "pre_tokenizer Metaspace";
    if (get(metaspace, "replacement") != kMetaSpace) {
      refuse(format("{}.replacement", key), get(metaspace, "replacement"), "\"\\u2581\"");
    }
    const io::Json& scheme = get(metaspace, "prepend_scheme");
    if (scheme.is_null() || scheme == "always") {
      result_.prefix_space = PrefixSpace::always;
    } else if (scheme == "first") {
      result_.prefix_space = PrefixSpace::first;
    } else if (scheme != "never") {
      refuse(format("{}.prepend_scheme", key), scheme, "always, first, never");
    }
    // Older files have it; the library takes it only where it says the same.
    const bool adds = read_bool(metaspace, key, "add_prefix_space", true);
    if (!adds && result_.prefix_space != PrefixSpace::never) {
      refuse(format("{}.add_prefix_space", key), false, "true unless prepend_scheme is never");
    }
    result_.meta_space = true;
    if (read_bool(metaspace, key, "split", true)) result_.pattern = WordPattern::meta_words;
  }

  void read_split(const io::Json& split) {
    // Every character belongs to a match, so both ways of splitting keep the matches and no more.
    const io::Json& behavior = get(split, "behavior");
    const bool invert = read_bool(split, "pre_tokenizer Split", "invert", false);
    if (!(behavior == "Isolated" && !invert) && !(behavior == "Removed" && invert)) {
      refuse("pre_tokenizer Split", split,
             "behavior Isolated with invert false, Removed with invert true");
    }
    const io::Json& regex = get(get(split, "pattern"), "Regex");
    const auto pattern =
        regex.is_string() ? word_pattern(regex.get_ref<const std::string&>()) : std::nullopt;
    if (!pattern) refuse("pre_tokenizer Split pattern", get(split, "pattern"), known_patterns());
    result_.pattern = *pattern;
  }

  static std::string known_patterns() { return "Regex " + known_word_patterns(); }

  void read_model(const io::Json& model) {
    if (!model.is_object()) refuse("model", model, "an object with type BPE");
    // Old files have no type; a BPE is the model that has merges.
    if (model.contains("type") && model["type"] != "BPE") {
      refuse("model.type", model["type"], "\"BPE\"");
    }
    const io::Json& dropout = get(model, "dropout");
    if (!dropout.is_null() && dropout != 0) refuse("model.dropout", dropout, "null");
    if (byte_level_ && read_bool(model, "model", "byte_fallback", false)) {
      refuse("model.byte_fallback", true, "false with ByteLevel");
    }
    for (const char* const key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const io::Json& affix = get(model, key);
      if (!affix.is_null() && affix != "") refuse(format("model.{}", key), affix, "null, \"\"");
    }
    read_vocabulary(get(model, "vocab"));
    read_merges(get(model, "merges"));
    if (read_bool(model, "model", "ignore_merges", false)) {
      for (const auto& [token, id] : vocabulary_) {
        if (!byte_level_) {
          result_.model.whole_words[token] = id;
        } else if (auto bytes = bytes_of_alphabet(token)) {
          result_.model.whole_words[*bytes] = id;
        }
      }
    } else if (!byte_level_ && result_.pattern == WordPattern::whole && !joins_words_) {
      result_.pattern = WordPattern::meta_runs;
    }
  }

  // Of a token of the vocabulary, when it is decoded.
  std::string bytes_of(const std::string& token) const {
    if (byte_level_) return bytes_of_alphabet(token).value_or(token);
    if (const auto byte = byte_of_fallback(token)) return {static_cast<char>(*byte)};
    return normalize(token, {{NormalizerStep::Kind::replace, std::string(kMetaSpace), " "}});
  }

  void set_bytes(int64_t id, std::string bytes, const std::string& key) {
    if (id < 0 || id >= kMaxId) {
      fail(format("{} has id {}, must be at least 0 and below {}", key, id, kMaxId));
    }
    if (static_cast<size_t>(id) >= result_.bytes_of.size()) result_.bytes_of.resize(id + 1);
    result_.bytes_of[id] = std::move(bytes);
  }

  void read_vocabulary(const io::Json& vocab) {
    if (!vocab.is_object()) refuse("model.vocab", vocab, "an object of tokens and ids");
    std::unordered_set<int64_t> ids;
    for (const auto& [token, value] : vocab.items()) {
      const auto key = format("model.vocab {}", shown(token));
      if (!value.is_number_integer()) refuse(key, value, "an integer");
      const auto id = value.get<int64_t>();
      if (!ids.insert(id).second) fail(format("{} has id {}, which another has too", key, id));
      set_bytes(id, bytes_of(token), key);
      vocabulary_[token] = static_cast<int32_t>(id);
      if (byte_level_ || token.empty()) continue;
      const auto character = utf8_at(token, 0);
      if (character && character->size == token.size()) {
        result_.model.character_tokens[character->code_point] = static_cast<int32_t>(id);
      }
    }
    for (int byte = 0; byte < 256; ++byte) {
      std::string symbol;
      if (byte_level_) {
        append_utf8(symbol, kCharacterOfByte[byte]);
      } else {
        symbol = fallback_of_byte(byte);
      }
      const auto found = vocabulary_.find(symbol);
      if (found == vocabulary_.end()) {
        fail(
            format("model.vocab has no token {} for byte {}; supported: vocabularies with all "
                   "256 bytes",
                   shown(symbol), byte));
      }
      result_.model.byte_tokens[byte] = found->second;
    }
  }

  int32_t token_of_merge(const std::string& token, size_t rank) const {
    const auto found = vocabulary_.find(token);
    if (found == vocabulary_.end()) {
      fail(format("model.merges[{}] needs token {}, which is not in model.vocab", rank,
                  shown(token)));
    }
    return found->second;
  }

  // ["a b", ...] until version 0.20 of the library, [["a", "b"], ...] since.
  void read_merges(const io::Json& merges) {
    if (!merges.is_array()) refuse("model.merges", merges, "an array of pairs");
    for (const auto& merge : merges) {
      const size_t rank = result_.model.merges.size();
      std::string left, right;
      if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        left = merge[0].get<std::string>();
        right = merge[1].get<std::string>();
      } else if (merge.is_string()) {
        const auto& text = merge.get_ref<const std::string&>();
        const size_t space = text.find(' ');
        if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
          refuse(format("model.merges[{}]", rank), merge, "two tokens and one space between");
        }
        left = text.substr(0, space);
        right = text.substr(space + 1);
      } else {
        refuse(format("model.merges[{}]", rank), merge, "\"a b\", [\"a\", \"b\"]");
      }
      result_.model.merges.push_back({token_of_merge(left, rank), token_of_merge(right, rank),
                                      token_of_merge(left + right, rank)});
      joins_words_ |= right.starts_with(kMetaSpace) && !left.ends_with(kMetaSpace);
    }
  }

  void read_added_tokens(const io::Json& added) {
    if (added.is_null()) return;
    if (!added.is_array()) refuse("added_tokens", added, "an array");
    // The library counts on from the vocabulary and does not look at the ids; where they differ the
    // file is not what its author thinks.
    auto next_id = static_cast<int64_t>(vocabulary_.size());
    std::unordered_set<std::string> contents, normalized_contents;
    for (const auto& token : added) {
      const io::Json& content = get(token, "content");
      if (!content.is_string() || content == "") {
        refuse("added_tokens content", token, "a token that is not empty");
      }
      const auto& text = content.get_ref<const std::string&>();
      const auto key = format("added_tokens {}", shown(content));
      if (!contents.insert(text).second) fail(format("{} is listed twice", key));
      for (const char* const property : {"single_word", "lstrip", "rstrip"}) {
        if (read_bool(token, key, property, false)) {
          refuse(format("{}.{}", key, property), true, "false");
        }
      }
      const auto found = vocabulary_.find(text);
      const int64_t id = found != vocabulary_.end() ? found->second : next_id++;
      if (get(token, "id") != id) {
        fail(format("{} has id {}, but its place in the vocabulary is {}", key,
                    shown(get(token, "id")), id));
      }
      set_bytes(id, text, key);
      if (!read_bool(token, key, "normalized", true)) {
        result_.added_tokens.push_back({text, static_cast<int32_t>(id)});
        continue;
      }
      const std::string normalized = normalize(text, result_.normalizer);
      if (normalized.empty() || !normalized_contents.insert(normalized).second) {
        fail(
            format("{} is {} once it is normalized, must differ from other tokens and not be empty",
                   key, shown(normalized)));
      }
      result_.normalized_added_tokens.push_back({normalized, static_cast<int32_t>(id)});
    }
  }

  static constexpr const char* kPreTokenizers =
      "ByteLevel, or a Sequence of one Split and ByteLevel; with model.byte_fallback true also "
      "Metaspace or null";

  std::string path_;
  TokenizerJson result_;
  Vocabulary vocabulary_;
  bool byte_level_ = true;    // else SentencePiece's: tokens are text, with U+2581 for spaces
  bool joins_words_ = false;  // a merge puts U+2581 after another character
};

}  // namespace

TokenizerJson read_tokenizer_json(const std::string& path) { return Reader(path).read(); }

}  // namespace lockstep::data
