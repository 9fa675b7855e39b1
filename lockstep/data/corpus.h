// SPDX-License-Identifier: Apache-2.0
// Training data as one long stream of tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/data/tokenizer/tokenizer.h"

namespace lockstep::data {

// What tells data from other data, whatever files it is in.
struct DataIdentity {
  int64_t tokens = 0;
  // CRC32C of all tokens or, beyond 2^24, of 257 runs of 4096 of them; and of where examples and
  // their completions begin and end.
  uint32_t crc = 0;
  uint32_t documents = 0;  // CRC32C of where documents end; 0 where they are read as one stream
  int64_t modified = 0;    // of the file that was changed last, in seconds since 1970; not compared

  bool operator==(const DataIdentity& other) const {
    return tokens == other.tokens && crc == other.crc &&
           (documents == other.documents || documents == 0 || other.documents == 0);
  }
  bool is_sampled() const { return tokens > int64_t{1} << 24; }
  std::string describe() const;  // "1000 tokens with checksum 0a1b2c3d"
};

// A prompt and its completion, as positions in the stream of tokens.
struct Example {
  int64_t begin = 0;
  int64_t answer = 0;  // where the completion begins
  int64_t end = 0;     // after the completion and its end of text

  // Of the inputs that a row of seq_len has of it: all, and those before the first whose target is
  // a token of the completion.
  int64_t inputs(int64_t seq_len) const { return std::min(end - begin - 1, seq_len); }
  int64_t unanswered() const { return answer - begin - 1; }
  bool operator==(const Example&) const = default;
};

class Packing;

// A value; copies share the data, which never changes. May be read by several threads. A file that
// shrinks while it lives is a DataError of what reads it.
class Corpus {
 public:
  // `path` as for find_data_files. Files are text, token ids (.bin), which the tokenizer does not
  // touch, or JSON lines (.jsonl); several kinds together are a ConfigError. With the tokenizer
  // `bytes` a token is a byte of the text; any other encodes all text now, into memory, with its
  // end_of_text() between files or records, and after each completion.
  static Corpus open(const std::string& path, const Tokenizer& tokenizer);

  int64_t size() const { return end_ - begin_; }  // in tokens
  // Copies tokens [begin, begin + out.size()); throws ConfigError where they are not all there.
  void read(int64_t begin, std::span<int64_t> out) const;
  // The largest of the first `limit_tokens` tokens; -1 if there is none.
  int64_t max_token(int64_t limit_tokens) const;
  // The files are token ids, which no tokenizer touched.
  bool has_token_ids() const;
  // The records are prompts with completions: samples are examples, not windows of the stream.
  bool has_examples() const { return examples_ != nullptr; }
  std::span<const Example> examples() const;  // positions are those of read()
  // A stream as its documents: examples without a prompt, of at least two tokens. Text files, JSON
  // records and the documents of a Megatron index are documents. In other token files they end
  // with the token `end_of_text`, which must be there: ConfigError else. Examples stay as they are.
  Corpus documents(std::optional<int64_t> end_of_text) const;
  bool has_documents() const;
  // Samples become rows of seq_len that hold several examples, or documents, as a whole: first fit,
  // longest first. A document longer than a row is cut into pieces, an example at its end.
  Corpus packed(int64_t seq_len) const;
  const Packing* packing() const { return packing_.get(); }  // null: not packed
  // Without the examples of which a row of seq_len has no token of the completion.
  Corpus answered(int64_t seq_len) const;
  // Tokens [begin, end) of this one, and the examples that lie there as a whole; not packed.
  Corpus slice(int64_t begin, int64_t end) const;
  // "1234 files, 12.3 MB of text, 12345678 tokens"
  std::string describe() const;
  // Reads all tokens, or some of many.
  DataIdentity identity() const;
  // Where a token is from: "shard_2.bin, token 17".
  std::string locate(int64_t position) const;

 private:
  struct Data;
  std::vector<int64_t> document_ends(std::optional<int64_t> end_of_text) const;
  using Examples = std::shared_ptr<const std::vector<Example>>;
  Corpus(std::shared_ptr<const Data> data, int64_t begin, int64_t end, Examples examples)
      : data_(std::move(data)), begin_(begin), end_(end), examples_(std::move(examples)) {}

  std::shared_ptr<const Data> data_;
  int64_t begin_, end_;
  Examples examples_;  // null for a stream of text
  std::shared_ptr<const Packing> packing_ = nullptr;
};

struct Split {
  Corpus train, validation;
};

// The last `fraction` of the tokens, or of the examples, rounded down, for validation. It must be
// in [0, 1).
Split hold_out(const Corpus& corpus, double fraction);

// Looks at the files of a data path without encoding text: throws the ConfigError of open() for
// files of several kinds and for records that cannot be used.
void check_files(const std::string& path);

}  // namespace lockstep::data
