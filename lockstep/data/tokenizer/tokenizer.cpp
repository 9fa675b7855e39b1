// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokenizer/tokenizer.h"

#include <filesystem>
#include <mutex>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/data/tokenizer/model_files.h"
#include "lockstep/data/tokenizer/tokenizer_json.h"

namespace lockstep::data {
namespace {

using Workspace = Bpe::Workspace;

// Workspaces of calls that have ended. A call takes one, so that what the cache learned in earlier
// calls is kept, and two calls at the same time do not wait for each other.
class WorkspacePool {
 public:
  std::unique_ptr<Workspace> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<Workspace>();
    auto workspace = std::move(free_.back());
    free_.pop_back();
    return workspace;
  }

  void give_back(std::unique_ptr<Workspace> workspace) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(workspace));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> free_;
};

// Calls on_token(id) for each of the tokens and on_text(piece) for each piece between, in order.
template <class OnToken, class OnText>
void split_at(const AddedTokens& added, std::string_view text, OnToken on_token, OnText on_text) {
  size_t begin = 0;
  while (const auto found = added.find(text, begin)) {
    if (found->begin > begin) on_text(text.substr(begin, found->begin - begin));
    on_token(found->id);
    begin = found->end;
  }
  if (begin < text.size()) on_text(text.substr(begin));
}

}  // namespace

struct Tokenizer::Tables {
  Tables() = default;
  explicit Tables(TokenizerJson json)
      : bpe(std::move(json.model)),
        normalizer(std::move(json.normalizer)),
        pattern(json.pattern),
        prefix_space(json.prefix_space),
        meta_space(json.meta_space),
        bytes_of(std::move(json.bytes_of)) {
    for (const char* const content : {"<|endoftext|>", "<|end_of_text|>", "</s>"}) {
      for (const auto* list : {&json.added_tokens, &json.normalized_added_tokens}) {
        for (const auto& token : *list) {
          if (!end_of_text && token.content == content) end_of_text = token.id;
        }
      }
    }
    added = AddedTokens(std::move(json.added_tokens));
    normalized_added = AddedTokens(std::move(json.normalized_added_tokens));
  }

  void encode_piece(std::string_view piece, bool is_first, Workspace& workspace,
                    std::vector<int32_t>& tokens) const {
    std::string changed;
    if (meta_space) {
      changed = normalize(piece, {{NormalizerStep::Kind::replace, " ", std::string(kMetaSpace)}});
      piece = changed;
    }
    const std::string_view space = meta_space ? kMetaSpace : " ";
    const bool adds =
        prefix_space == PrefixSpace::always || (prefix_space == PrefixSpace::first && is_first);
    if (adds && !piece.starts_with(space)) {
      std::string with_space;
      with_space.reserve(piece.size() + space.size());
      with_space = space;
      with_space += piece;
      changed = std::move(with_space);
      piece = changed;
    }
    while (!piece.empty()) {
      const size_t size = first_word(piece, pattern);
      bpe->encode(piece.substr(0, size), workspace, tokens);
      piece.remove_prefix(size);
    }
  }

  std::string name;
  std::optional<Bpe> bpe;  // none: a token is a byte
  std::vector<NormalizerStep> normalizer;
  WordPattern pattern = WordPattern::whole;
  PrefixSpace prefix_space = PrefixSpace::never;
  bool meta_space = false;
  AddedTokens added, normalized_added;
  std::vector<std::string> bytes_of;
  std::optional<int32_t> end_of_text;
  mutable WorkspacePool pool;
};

Tokenizer Tokenizer::bytes() {
  auto tables = std::make_shared<Tables>();
  tables->name = "bytes";
  for (int byte = 0; byte < 256; ++byte) tables->bytes_of.push_back({static_cast<char>(byte)});
  return Tokenizer(std::move(tables));
}

Tokenizer Tokenizer::from_file(const std::string& tokenizer_json, const std::string& model_folder) {
  auto tables = std::make_shared<Tables>(read_tokenizer_json(tokenizer_json));
  tables->name = tokenizer_json;
  const ModelFiles files = find_model_files(tokenizer_json, model_folder);
  if (const auto named = named_end_of_text(files, tables->bytes_of)) tables->end_of_text = named;
  return Tokenizer(std::move(tables));
}

Tokenizer Tokenizer::open(const std::string& name, const std::string& model_folder) {
  if (name == "bytes") return bytes();
  std::filesystem::path path = name;
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) path /= "tokenizer.json";
  if (!std::filesystem::is_regular_file(path, ignored)) {
    throw ConfigError(
        format("tokenizer {}: is not a file; a tokenizer is \"bytes\", the path of a "
               "tokenizer.json, or that of a folder with one",
               path.string()));
  }
  return from_file(path.string(), model_folder);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> tokens;
  if (!tables_->bpe) {
    tokens.reserve(text.size());
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }
  auto workspace = tables_->pool.take();
  const auto on_token = [&](int32_t id) { tokens.push_back(id); };
  split_at(tables_->added, text, on_token, [&](std::string_view part) {
    const bool begins = part.data() == text.data();
    std::string normalized;
    if (!tables_->normalizer.empty()) {
      normalized = normalize(part, tables_->normalizer);
      part = normalized;
    }
    split_at(tables_->normalized_added, part, on_token, [&](std::string_view piece) {
      const bool is_first = begins && piece.data() == part.data();
      tables_->encode_piece(piece, is_first, *workspace, tokens);
    });
  });
  tables_->pool.give_back(std::move(workspace));
  return tokens;
}

std::string Tokenizer::decode(std::span<const int32_t> tokens) const {
  std::string text;
  for (const int32_t token : tokens) {
    if (token < 0 || token >= vocab_size() || tables_->bytes_of[token].empty()) {
      throw ConfigError(format("tokenizer {}: no token has id {}; ids are at least 0 and below {}",
                               name(), token, vocab_size()));
    }
    text += tables_->bytes_of[token];
  }
  return text;
}

int64_t Tokenizer::vocab_size() const { return static_cast<int64_t>(tables_->bytes_of.size()); }

std::optional<int32_t> Tokenizer::end_of_text() const { return tables_->end_of_text; }

const std::string& Tokenizer::name() const { return tables_->name; }

}  // namespace lockstep::data
