// SPDX-License-Identifier: Apache-2.0
// Files of token ids in the three layouts that others write: llm.c shards, nanoGPT's raw ids,
// Megatron's .bin with an .idx next to it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/data/tokens/token_source.h"

namespace lockstep::data {

enum class TokenLayout { llmc, nanogpt, megatron };

// "llm.c", "nanogpt", "megatron".
const char* name_of(TokenLayout layout);
// Throws ConfigError for another name.
TokenLayout token_layout(std::string_view name);

// data.bin -> data.idx.
std::string index_path(const std::string& path);

// Of a token file with an index of Megatron's: where in its tokens documents end. None where there
// is no index.
std::optional<std::vector<int64_t>> document_ends_in(const std::string& path);

// Its documents are seen as one stream.
class TokenFile {
 public:
  // Megatron where an .idx is next to it, llm.c by its magic number, else raw uint16. Everything
  // that the headers say is held against the files' sizes first; ConfigError where it does not fit.
  static TokenFile open(const std::string& path);

  TokenLayout kind() const { return kind_; }
  int64_t width() const { return width_of(tokens_.type()); }  // bytes of a token
  int64_t size() const { return tokens_.size(); }             // in tokens
  const TokenSource& tokens() const { return tokens_; }
  // What is left of it has no tokens.
  TokenSource take() { return std::move(tokens_); }
  void read(int64_t begin, std::span<int64_t> out) const { tokens_.read(begin, out); }

 private:
  TokenFile(TokenLayout kind, TokenSource tokens) : kind_(kind), tokens_(std::move(tokens)) {}

  TokenLayout kind_;
  TokenSource tokens_;
};

// Writes documents to a temporary file next to the target, which finish() puts in its place: other
// processes see the whole file or none. Without finish() nothing is left behind.
class TokenFileWriter {
 public:
  // `width` is 2 or 4 bytes a token; nanogpt has only 2. The path must end in .bin.
  TokenFileWriter(const std::string& path, TokenLayout layout, int64_t width);
  ~TokenFileWriter();
  TokenFileWriter(TokenFileWriter&&) noexcept;
  TokenFileWriter& operator=(TokenFileWriter&&) noexcept;

  // More tokens of the current document. ConfigError for an id that the width cannot hold.
  void write(std::span<const int32_t> tokens);
  void end_document();
  // Ends the current document if it has tokens. Replaces what was at the path, on disk when it
  // returns.
  void finish();

  int64_t documents() const;
  int64_t tokens() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::data
