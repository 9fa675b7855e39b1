// SPDX-License-Identifier: Apache-2.0
// Text to token ids and back.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::data {

// A value: copies share the tables. Threads may use one at the same time.
class Tokenizer {
 public:
  // A token is a byte; 256 of them.
  static Tokenizer bytes();
  // A Hugging Face tokenizer.json with byte-level BPE, as GPT-2, Llama 3, Qwen2 and Qwen3 have, or
  // with SentencePiece's BPE of characters, as Llama 2 and Mistral have. Throws ConfigError with
  // the file, the key and what is supported where it is of another kind. `model_folder` is for
  // end_of_text(); empty: the folder of the file.
  static Tokenizer from_file(const std::string& tokenizer_json,
                             const std::string& model_folder = "");
  // "bytes", the path of a tokenizer.json, or that of a folder with one.
  static Tokenizer open(const std::string& name, const std::string& model_folder = "");

  // What the `tokenizers` library gives with add_special_tokens=False and no truncation: tokens
  // that stand in the text, like <|endoftext|>, are found, others are not added. Any bytes can be
  // encoded; what is not UTF-8 counts as symbols of one byte.
  std::vector<int32_t> encode(std::string_view text) const;
  // The bytes that were encoded, as the normalizer left them, and with the spaces that were put
  // before words. Throws ConfigError where no token has the id.
  std::string decode(std::span<const int32_t> tokens) const;

  // The largest id, plus 1.
  int64_t vocab_size() const;
  // eos_token of the tokenizer_config.json next to the file; else the first eos_token_id of the
  // config.json, or of the generation_config.json, in the folder of the model; else the first of
  // <|endoftext|>, <|end_of_text|> and </s> that is an added token.
  std::optional<int32_t> end_of_text() const;
  // "bytes", or the path of the file.
  const std::string& name() const;

 private:
  struct Tables;
  explicit Tokenizer(std::shared_ptr<const Tables> tables) : tables_(std::move(tables)) {}
  std::shared_ptr<const Tables> tables_;
};

}  // namespace lockstep::data
