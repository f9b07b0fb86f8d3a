"""BERT (Devlin et al. 2019) with its pre-training heads.

Written for compiled graphs: all shapes are static, nothing is read by the host, and the language-model head runs only
on the masked positions (at most 20 of 128), which is most of what can be saved at sequence length 128.

Axes in names: B batch, S sequence, P predictions, H hidden, V vocabulary, N heads, D width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from trn_dist.errors import ConfigError
from trn_dist.models.bert.config import BertConfig

# Added to the attention scores of padding. exp(-10000) is 0 in every dtype, and the sum stays finite in bf16.
_MASKED = -10_000.0


class PreTrainingLogits(NamedTuple):
    """What the two heads say.

    Attributes:
        masked_lm: [B, P, V] scores of the vocabulary (without its padding) at the masked positions.
        next_sentence: [B, 2] scores of "follows" (0) and "is random" (1).
    """

    masked_lm: torch.Tensor
    next_sentence: torch.Tensor


class PreTrainingLosses(NamedTuple):
    """Sums of cross entropy, so that the caller can divide by counts of a larger batch.

    Attributes:
        masked_lm_sum: fp32 scalar, over the masked positions.
        masked_lm_count: fp32 scalar, the number of masked positions.
        next_sentence_sum: fp32 scalar, over the sequences.
    """

    masked_lm_sum: torch.Tensor
    masked_lm_count: torch.Tensor
    next_sentence_sum: torch.Tensor


class BertForPreTraining(nn.Module):
    """BERT encoder, masked-language-model head and next-sentence head.

    The decoder of the language-model head is the word embedding itself, used twice. There is one parameter, so the two
    stay tied through `.to(device)`, which on XLA breaks a tie made by assigning one parameter to two modules.

    Args:
        config: sizes.
        seed: of the initial weights, drawn on the CPU: every worker that passes the same seed starts the same.
    """

    def __init__(self, config: BertConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_layers))
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder_bias = nn.Parameter(torch.zeros(config.padded_vocab_size))
        self.next_sentence = nn.Linear(config.hidden_size, 2)
        self._initialize(torch.Generator().manual_seed(seed))

    def encode(self, input_ids: torch.Tensor, input_mask: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
        """Returns the last layer's output.

        Args:
            input_ids: [B, S] tokens, any integer dtype.
            input_mask: [B, S] 1 for tokens, 0 for padding.
            segment_ids: [B, S] segment of each token.

        Returns:
            [B, S, H] in the dtype of the weights.

        Raises:
            ConfigError: the sequence is longer than the model has positions.
        """
        if input_ids.shape[1] > self.config.max_position_embeddings:
            raise ConfigError(
                f"sequences of {input_ids.shape[1]} tokens do not fit a model with max_position_embeddings "
                f"{self.config.max_position_embeddings}: use shorter sequences or a larger model"
            )
        hidden_BSH: torch.Tensor = self.embeddings(input_ids, segment_ids)
        bias_B11S = ((1.0 - input_mask.to(hidden_BSH.dtype)) * _MASKED)[:, None, None, :]
        for layer in self.layers:
            hidden_BSH = layer(hidden_BSH, bias_B11S)
        return hidden_BSH

    def forward(
        self,
        input_ids: torch.Tensor,
        input_mask: torch.Tensor,
        segment_ids: torch.Tensor,
        masked_lm_positions: torch.Tensor,
    ) -> PreTrainingLogits:
        """Returns the scores of both heads.

        Args:
            input_ids: see `encode`.
            input_mask: see `encode`.
            segment_ids: see `encode`.
            masked_lm_positions: [B, P] positions to predict; unused places may hold any position.

        Raises:
            ConfigError: see `encode`.
        """
        hidden_BSH = self.encode(input_ids, input_mask, segment_ids)
        index_BPH = masked_lm_positions.long()[:, :, None].expand(-1, -1, hidden_BSH.shape[-1])
        picked_BPH = self.transform_norm(F.gelu(self.transform(hidden_BSH.gather(1, index_BPH))))
        scores_BPV = F.linear(picked_BPH, self.embeddings.word.weight, self.decoder_bias)
        pooled_BH = torch.tanh(self.pooler(hidden_BSH[:, 0]))
        return PreTrainingLogits(scores_BPV[..., : self.config.vocab_size], self.next_sentence(pooled_BH))

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, self.config.initializer_range, generator=generator)
            if isinstance(module, nn.Linear):
                module.bias.zero_()


class BertEmbeddings(nn.Module):
    """Sum of word, position and segment embeddings, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.segment = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
        """Returns [B, S, H]."""
        position_SH = self.position.weight[: input_ids.shape[1]]
        summed_BSH = self.word(input_ids.long()) + position_SH + self.segment(segment_ids.long())
        output: torch.Tensor = self.dropout(self.norm(summed_BSH))
        return output


class BertLayer(nn.Module):
    """Self-attention and feed-forward, each added to its input and normalised afterwards (post-LN)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.num_heads, self.attention_dropout = config.num_heads, config.attention_dropout
        self.qkv = nn.Linear(h, 3 * h)
        self.attention_output = nn.Linear(h, h)
        self.attention_norm = nn.LayerNorm(h, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(h, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, h)
        self.output_norm = nn.LayerNorm(h, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_BSH: torch.Tensor, bias_B11S: torch.Tensor) -> torch.Tensor:
        """Returns [B, S, H]."""
        attended_BSH = self.attention_output(self._attend(hidden_BSH, bias_B11S))
        hidden_BSH = self.attention_norm(hidden_BSH + self.dropout(attended_BSH))
        expanded_BSH = self.output(F.gelu(self.intermediate(hidden_BSH)))
        output: torch.Tensor = self.output_norm(hidden_BSH + self.dropout(expanded_BSH))
        return output

    def _attend(self, hidden_BSH: torch.Tensor, bias_B11S: torch.Tensor) -> torch.Tensor:
        batch, seq_len, _ = hidden_BSH.shape
        qkv_BS3ND = self.qkv(hidden_BSH).view(batch, seq_len, 3, self.num_heads, -1)
        query_BNSD, key_BNSD, value_BNSD = qkv_BS3ND.permute(2, 0, 3, 1, 4).unbind()
        scale = query_BNSD.shape[-1] ** -0.5
        scores_BNSS = query_BNSD @ key_BNSD.transpose(-1, -2) * scale + bias_B11S
        weights_BNSS = F.dropout(scores_BNSS.softmax(-1), self.attention_dropout, self.training)
        attended_BSH: torch.Tensor = (weights_BNSS @ value_BNSD).transpose(1, 2).reshape(batch, seq_len, -1)
        return attended_BSH


def pretraining_losses(
    logits: PreTrainingLogits, masked_lm_ids: torch.Tensor, next_sentence_labels: torch.Tensor
) -> PreTrainingLosses:
    """Returns the two losses of a batch, as sums, in fp32 whatever the dtype of the scores.

    Args:
        logits: from `BertForPreTraining`.
        masked_lm_ids: [B, P] tokens to predict; 0 marks an unused place, which does not count.
        next_sentence_labels: [B] 0 where the second segment follows the first, 1 where it is random.
    """
    used_BP = (masked_lm_ids != 0).float()
    losses_BP = F.cross_entropy(
        logits.masked_lm.float().flatten(0, 1), masked_lm_ids.long().flatten(), reduction="none"
    )
    return PreTrainingLosses(
        masked_lm_sum=(losses_BP * used_BP.flatten()).sum(),
        masked_lm_count=used_BP.sum(),
        next_sentence_sum=F.cross_entropy(
            logits.next_sentence.float(), next_sentence_labels.long().flatten(), reduction="sum"
        ),
    )
