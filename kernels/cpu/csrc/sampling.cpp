#include "sampling.h"

#include <algorithm>

#include "bitmask.h"
#include "sampling_draw.h"
#include "sampling_logprobs.h"
#include "sampling_rows.h"
#include "threads.h"

namespace firsttoken {
namespace {

// The place of a row among ascending ones; -1: it isn't there.
int64_t find_row(const int64_t* rows, int64_t num_rows, int64_t row) {
  const int64_t* found = std::lower_bound(rows, rows + num_rows, row);
  return found != rows + num_rows && *found == row ? found - rows : -1;
}

bool are_rows(const int64_t* rows, int64_t num_rows, int64_t num_rows_of_batch) {
  return std::all_of(rows, rows + num_rows,
                     [&](int64_t row) { return row >= 0 && row < num_rows_of_batch; });
}

// Those of one row.
struct Tokens {
  const int64_t* ids;
  int64_t first, last;  // places among those of all rows
  int64_t entry;        // of the row among those that have some; -1: it has none

  explicit operator bool() const { return entry >= 0; }
};

Tokens tokens_of(const RowTokens& tokens, int64_t row) {
  const int64_t entry = find_row(tokens.rows_E, tokens.num_rows, row);
  if (entry < 0) return {nullptr, 0, 0, -1};
  return {tokens.token_ids_P, tokens.starts_E1[entry], tokens.starts_E1[entry + 1], entry};
}

bool are_tokens(const RowTokens& tokens, const SamplingBatch& batch) {
  if (!are_rows(tokens.rows_E, tokens.num_rows, batch.num_rows)) return false;
  if (tokens.num_rows == 0) return true;
  return std::all_of(tokens.token_ids_P, tokens.token_ids_P + tokens.starts_E1[tokens.num_rows],
                     [&](int64_t id) { return id >= 0 && id < batch.vocab_size; });
}

bool is_valid(const SamplingBatch& batch) {
  for (const RowTokens* tokens :
       {&batch.counted, &batch.biased, &batch.allowed, &batch.banned, &batch.early_ends}) {
    if (!are_tokens(*tokens, batch)) return false;
  }
  return are_rows(batch.masked_rows_G, batch.num_masked, batch.num_rows) &&
         are_rows(batch.drawn_rows_D, batch.num_drawn, batch.num_rows) &&
         are_rows(batch.told_rows_L, batch.num_told, batch.num_rows);
}

// ---------------------------------------------------------------- edits

void penalize(const SamplingBatch& batch, const Tokens& tokens, float* logits) {
  const float repetition = batch.repetition_E[tokens.entry];
  const double frequency = batch.frequency_E[tokens.entry];
  const double presence = batch.presence_E[tokens.entry];
  for (int64_t i = tokens.first; i < tokens.last; ++i) {
    const auto count = static_cast<double>(batch.output_counts_P[i]);
    const double loss = frequency * count + (count > 0.0 ? presence : 0.0);
    float& logit = logits[tokens.ids[i]];
    logit = (logit > 0.0f ? logit / repetition : logit * repetition) - static_cast<float>(loss);
  }
}

void keep_only(const Tokens& tokens, int64_t vocab_size, float* logits, RowScratch& scratch) {
  float* before = scratch.values.data();
  std::copy_n(logits, vocab_size, before);
  std::fill_n(logits, vocab_size, -kInfinity);
  for (int64_t i = tokens.first; i < tokens.last; ++i) {
    logits[tokens.ids[i]] = before[tokens.ids[i]];
  }
}

// What a request's parameters and grammar do to one row.
struct Edits {
  Tokens counted, biased, allowed, banned, early_ends;
  int64_t mask;  // place among the masked rows; -1: the row is not masked

  Edits(const SamplingBatch& batch, int64_t row)
      : counted(tokens_of(batch.counted, row)),
        biased(tokens_of(batch.biased, row)),
        allowed(tokens_of(batch.allowed, row)),
        banned(tokens_of(batch.banned, row)),
        early_ends(tokens_of(batch.early_ends, row)),
        mask(find_row(batch.masked_rows_G, batch.num_masked, row)) {}

  explicit operator bool() const {
    return counted || biased || allowed || banned || early_ends || mask >= 0;
  }
};

// All but the early ends.
void edit_row(const SamplingBatch& batch, const Edits& edits, float* logits, RowScratch& scratch) {
  const Tokens &biased = edits.biased, &banned = edits.banned;
  if (edits.counted) penalize(batch, edits.counted, logits);
  for (int64_t i = biased.first; i < biased.last; ++i) logits[biased.ids[i]] += batch.biases_P[i];
  if (edits.allowed) keep_only(edits.allowed, batch.vocab_size, logits, scratch);
  for (int64_t i = banned.first; i < banned.last; ++i) logits[banned.ids[i]] = -kInfinity;
  if (edits.mask >= 0) {
    mask_row(logits, batch.vocab_size, batch.bitmask_GW + edits.mask * batch.words_per_row);
  }
}

// Takes the early ends away, unless nothing is left then.
RowScan scan_without_ends(const Tokens& ends, int64_t vocab_size, float* logits,
                          RowScratch& scratch) {
  float* group_maxima = scratch.group_maxima.data();
  if (!ends) return scan_row(logits, vocab_size, group_maxima);
  const auto num_ends = static_cast<size_t>(ends.last - ends.first);
  if (scratch.saved_logits.size() < num_ends) scratch.saved_logits.resize(num_ends);
  float* saved = scratch.saved_logits.data() - ends.first;
  for (int64_t i = ends.first; i < ends.last; ++i) saved[i] = logits[ends.ids[i]];
  for (int64_t i = ends.first; i < ends.last; ++i) logits[ends.ids[i]] = -kInfinity;
  const RowScan scan = scan_row(logits, vocab_size, group_maxima);
  if (scan.has_tokens()) return scan;
  for (int64_t i = ends.first; i < ends.last; ++i) logits[ends.ids[i]] = saved[i];
  return scan_row(logits, vocab_size, group_maxima);
}

// ---------------------------------------------------------------- one row

int64_t choose(const SamplingBatch& batch, int64_t row, const float* logits, float largest,
               RowScratch& scratch) {
  const int64_t d = find_row(batch.drawn_rows_D, batch.num_drawn, row);
  if (d < 0) return first_largest(logits, batch.vocab_size, scratch.group_maxima.data(), largest);
  const DrawParams params = {batch.temperature_D[d], batch.top_k_D[d], batch.top_p_D[d],
                             batch.min_p_D[d]};
  return draw_token(logits, batch.vocab_size, largest, params, batch.uniform_D[d], scratch);
}

// Logprobs of one row of `told`; the chosen token's come after the others.
class LogprobsOfRow {
 public:
  LogprobsOfRow(const SampledLogprobs& told, int64_t place) : told_(told), place_(place) {}

  void tell_top(const float* logits, int64_t vocab_size, const RowScan& scan, int64_t num_top,
                RowScratch& scratch) {
    largest_ = scan.largest;
    log_total_ = log_total(logits, vocab_size, largest_, scratch);
    const int64_t first = place_ * told_.most_top;
    top_logprobs(logits, vocab_size, scan, log_total_, num_top, told_.top_token_ids_LN + first,
                 told_.top_logprobs_LN + first, scratch);
  }

  void tell_chosen(const float* logits, int64_t vocab_size, int64_t token_id) {
    told_.logprobs_L[place_] = logprob(logits[token_id], largest_, log_total_);
    told_.ranks_L[place_] = count_larger(logits, vocab_size, logits[token_id]) + 1;
  }

 private:
  const SampledLogprobs& told_;
  int64_t place_;
  float largest_ = 0.0f;
  double log_total_ = 0.0;
};

RowStatus sample_row(const SamplingBatch& batch, const SampledLogprobs& told, int64_t row,
                     RowScratch& scratch, int64_t& token_id) {
  const int64_t vocab_size = batch.vocab_size;
  float* logits = batch.logits_RV + row * vocab_size;
  RowScan scan = scan_row(logits, vocab_size, scratch.group_maxima.data());
  if (!scan.is_finite()) return kNotFinite;

  const Edits edits(batch, row);
  const int64_t place = find_row(batch.told_rows_L, batch.num_told, row);
  LogprobsOfRow logprobs(told, place);
  const float* raw_logits = logits;
  if (place >= 0) {
    logprobs.tell_top(logits, vocab_size, scan, batch.num_top_L[place], scratch);
    if (edits) {
      std::copy_n(logits, vocab_size, scratch.raw_logits.data());
      raw_logits = scratch.raw_logits.data();
    }
  }
  if (edits) {
    edit_row(batch, edits, logits, scratch);
    scan = scan_without_ends(edits.early_ends, vocab_size, logits, scratch);
  }
  if (!scan.has_tokens()) return scan.all_below_infinity ? kNothingAllowed : kOverflows;
  token_id = choose(batch, row, logits, scan.largest, scratch);
  if (place >= 0) logprobs.tell_chosen(raw_logits, vocab_size, token_id);
  return kSampled;
}

RowScratch& scratch_of_thread(int64_t vocab_size) {
  thread_local RowScratch scratch;
  scratch.resize(vocab_size);
  return scratch;
}

}  // namespace
}  // namespace firsttoken

extern "C" {

// One token and one status for each row; logprobs of the rows that are told, unless they fail.
// Returns 0, or 1 and does nothing where a row or a token is none of the batch's.
int ft_sample_rows(const firsttoken::SamplingBatch* batch, const firsttoken::SampledLogprobs* told,
                   int64_t* token_ids_R, int32_t* statuses_R) {
  using namespace firsttoken;
  if (!is_valid(*batch)) return 1;
  PoolLease pool;
  (*pool).for_each(batch->num_rows, [&](int64_t row, int) {
    RowScratch& scratch = scratch_of_thread(batch->vocab_size);
    statuses_R[row] = sample_row(*batch, *told, row, scratch, token_ids_R[row]);
  });
  return 0;
}

// Logprobs of a given token of each row; NaN where a row is not finite. Returns 0, or 1 and does
// nothing where a token is none of the vocabulary's.
int ft_token_logprobs(const float* logits_LV, int64_t num_rows, int64_t vocab_size,
                      const int64_t* token_ids_L, const int64_t* num_top_L,
                      const firsttoken::SampledLogprobs* told) {
  using namespace firsttoken;
  if (!are_rows(token_ids_L, num_rows, vocab_size)) return 1;
  PoolLease pool;
  (*pool).for_each(num_rows, [&](int64_t row, int) {
    RowScratch& scratch = scratch_of_thread(vocab_size);
    const float* logits = logits_LV + row * vocab_size;
    const RowScan scan = scan_row(logits, vocab_size, scratch.group_maxima.data());
    if (!scan.is_finite()) {
      told->logprobs_L[row] = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    LogprobsOfRow logprobs(*told, row);
    logprobs.tell_top(logits, vocab_size, scan, num_top_L[row], scratch);
    logprobs.tell_chosen(logits, vocab_size, token_ids_L[row]);
  });
  return 0;
}
}
