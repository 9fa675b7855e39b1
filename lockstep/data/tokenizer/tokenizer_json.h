// SPDX-License-Identifier: Apache-2.0
// What a Hugging Face tokenizer.json says, where it is one that we can follow exactly.
#pragma once

#include <string>
#include <vector>

#include "lockstep/data/tokenizer/added_tokens.h"
#include "lockstep/data/tokenizer/bpe.h"
#include "lockstep/data/tokenizer/normalizer.h"
#include "lockstep/data/tokenizer/pre_tokenizer.h"

namespace lockstep::data {

// Before which pieces of a text a space is put, unless they begin with one.
enum class PrefixSpace { never, first, always };

struct TokenizerJson {
  Bpe::Model model;
  std::vector<NormalizerStep> normalizer;
  WordPattern pattern = WordPattern::whole;
  PrefixSpace prefix_space = PrefixSpace::never;
  bool meta_space = false;  // the pre-tokenizer writes U+2581 for spaces
  // Looked for in this order: `normalized` ones, which are here as the normalizer leaves them, in
  // what the others leave.
  std::vector<AddedToken> added_tokens, normalized_added_tokens;
  std::vector<std::string> bytes_of;  // of each token; empty for an id that nothing has
};

// Throws ConfigError that names the file, the key and what is supported.
TokenizerJson read_tokenizer_json(const std::string& path);

}  // namespace lockstep::data
