// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/data_report.h"

#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/data/packing.h"
#include "lockstep/train/progress.h"

namespace lockstep::train {
namespace {

int64_t count_examples(const data::Corpus& corpus) {
  return static_cast<int64_t>(corpus.examples().size());
}

}  // namespace

std::string describe(const config::Data& data) {
  const bool examples = data.validation.has_examples();
  const int64_t held = examples ? count_examples(data.validation) : data.validation.size();
  std::string text =
      format("{}; {} {}{} held out", data.train.describe(), short_number(static_cast<double>(held)),
             data.validation.has_documents() ? "document"
             : examples                      ? "example"
                                             : "token",
             held == 1 ? "" : "s");
  if (const data::Packing* const packing = data.train.packing()) {
    text += format("; packed into {}, {:.1f} % used", counted(packing->rows(), "row"),
                   100.0 * static_cast<double>(packing->used()) /
                       static_cast<double>(packing->rows() * packing->seq_len()));
  }
  const auto end = data.tokenizer.end_of_text();
  if (end && !data.all.has_token_ids())
    text += format("; end of text {} ({})", data.tokenizer.decode({&*end, 1}), *end);
  return text;
}

void warn_of_data(const config::Data& data, const config::TrainConfig& config) {
  const bool documents = data.all.has_documents();
  if (documents && data.cut > 0) {
    log::warn(format(
        "of {}, {} are longer than train.seq_len {} + 1 and are cut into pieces that do not see "
        "each other; a longer train.seq_len keeps them whole",
        counted(count_examples(data.train) + count_examples(data.validation), "document"), data.cut,
        config.train.seq_len));
  }
  if (!documents && data.cut + data.dropped > 0) {
    log::warn(
        format("of {}, {} are longer than train.seq_len {} and cut, and {} are left out: nothing "
               "of their completion fits",
               counted(count_examples(data.train) + count_examples(data.validation) + data.dropped,
                       "example"),
               data.cut, config.train.seq_len, data.dropped));
  }
  if (!data.all.has_examples()) return;
  if (!documents && !data.tokenizer.end_of_text()) {
    log::warn(
        format("the tokenizer {} has no end-of-text token: completions are trained without an end, "
               "and text that the model generates will not stop; to have one, name it as eos_token "
               "in the tokenizer_config.json next to a tokenizer.json",
               data.tokenizer.name()));
  }
  const double fraction = config.data.validation_fraction().value_or(0);
  if (fraction > 0 && data::hold_out(data.all, fraction).validation.examples().empty()) {
    log::warn(
        format("data.validation {} of {} holds out none, so there is no validation loss; use a "
               "larger fraction or a separate file, or 0 if none is wanted",
               config.data.validation,
               counted(count_examples(data.all), documents ? "document" : "example")));
  }
}

}  // namespace lockstep::train
