"""Mistakes in ports and in tables; what is wrong was written down before any of them was run."""

# ruff: noqa: E501  # the lines of other files, as they stand there

from __future__ import annotations

from tests.causes.carriers import Plant

FORTY = {
    "neox_layout_code": Plant(
        "neox",
        "fused qkv read as (p h d), stored (h p d)",
        (
            (
                "qkv = self.qkv(x).view(b, s, self.heads, 3 * self.size)",
                "qkv = self.qkv(x).view(b, s, 3, self.heads, self.size)",
            ),
            ("q, k, v = qkv.transpose(1, 2).chunk(3, dim=-1)", "q, k, v = qkv.permute(2, 0, 3, 1, 4)"),
        ),
        names=("query, key and value interleaved wrongly",),
        says="[(h p d) o] and read as [(p h d) o]",
    ),
    "neox_sequential": Plant(
        "neox",
        "sequential branches where parallel is expected",
        (
            (
                "return x + self.attn(self.norm1(x), mask) + self.mlp(self.norm2(x))",
                "x = x + self.attn(self.norm1(x), mask)\n        return x + self.mlp(self.norm2(x))",
            ),
        ),
        names=("branches one after the other",),
        says="as in GPT-J",
    ),
    "neox_full_rotary": Plant(
        "neox",
        "all channels rotated where a quarter is expected",
        (("self.rot = self.size // 4", "self.rot = self.size"),),
        names=("rotary on the whole head",),
    ),
    "neox_rope_pairs": Plant(
        "neox",
        "rotation of neighbours where halves are expected",
        (
            (
                "a, b = x.chunk(2, dim=-1)\n    return torch.cat((-b, a), dim=-1)",
                "a, b = x[..., ::2], x[..., 1::2]\n    return torch.stack((-b, a), dim=-1).flatten(-2)",
            ),
            ("angle = torch.cat((angle, angle), dim=-1)", "angle = angle.repeat_interleave(2, dim=-1)"),
        ),
        names=("rotary pairing",),
    ),
    "neox_mlp_norm1": Plant(
        "neox",
        "the mlp reads norm1, not norm2",
        (("self.mlp(self.norm2(x))", "self.mlp(self.norm1(x))"),),
        names=("wrong tensor",),
        says="self.mlp(self.norm2(x))",
    ),
    "neox_not_itself": Plant(
        "neox",
        "a token does not see itself (mask diagonal off by one)",
        ((".tril()", ".tril(-1)"),),
        names=("causal mask off by one",),
        says=".tril(",
    ),
    "opt_arange": Plant(
        "opt",
        "positions ignore padding",
        (("places = mask.cumsum(1) * mask - 1", "places = torch.arange(s)"),),
        names=("other rows looked up",),
        says="skips places, such as padding",
    ),
    "opt_postnorm": Plant(
        "opt",
        "post-norm where pre-norm is expected",
        (
            (
                "x = x + self.attn(self.norm1(x), allowed)\n        h = F.relu(self.fc1(self.norm2(x)))\n        return x + self.fc2(h)",
                "x = self.norm1(x + self.attn(x, allowed))\n        return self.norm2(x + self.fc2(F.relu(self.fc1(x))))",
            ),
        ),
        names=("post-norm for pre-norm",),
    ),
    "opt_res_norm": Plant(
        "opt",
        "residual added from the norm's output",
        (("x = x + self.attn(self.norm1(x), allowed)", "x = self.norm1(x)\n        x = x + self.attn(x, allowed)"),),
        names=("residual taken after the norm",),
    ),
    "opt_mask_numbers": Plant(
        "opt",
        "mask of 1 and 0 added to the scores as numbers",
        (("attn_mask=allowed,", "attn_mask=allowed.to(q.dtype),"),),
        names=("mask added as 0 and 1",),
        says="attn_mask=allowed",
    ),
    "opt_head_split": Plant(
        "opt",
        "heads split as (d h)",
        (
            (
                "return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)",
                "return x.unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2)",
            ),
        ),
        names=("heads split wrongly",),
    ),
    "qwen_tile": Plant(
        "qwen2",
        "kv heads tiled in place of repeated",
        (
            (
                "k = k.repeat_interleave(self.heads // self.groups, dim=1)",
                "k = k.repeat(1, self.heads // self.groups, 1, 1)",
            ),
            (
                "v = v.repeat_interleave(self.heads // self.groups, dim=1)",
                "v = v.repeat(1, self.heads // self.groups, 1, 1)",
            ),
        ),
        names=("key and value heads tiled",),
    ),
    "qwen_value_rotated": Plant(
        "qwen2",
        "values are rotated as well",
        (
            (
                "q, k = rotate(q, cos, sin), rotate(k, cos, sin)",
                "q, k, v = rotate(q, cos, sin), rotate(k, cos, sin), rotate(v, cos, sin)",
            ),
        ),
        names=("values rotated",),
    ),
    "qwen_backwards": Plant(
        "qwen2",
        "rotation in the other direction",
        (("(x1 * cos - x2 * sin, x2 * cos + x1 * sin)", "(x1 * cos + x2 * sin, x2 * cos - x1 * sin)"),),
        names=("rotary direction",),
    ),
    "qwen_sees_next": Plant(
        "qwen2",
        "causal mask lets the next token be seen",
        (("row[None, :] <= row[:, None]", "row[None, :] <= row[:, None] + 1"),),
        names=("causal mask off by one",),
        says="1 position after it",
    ),
    "qwen_no_padding": Plant(
        "qwen2",
        "padding mask ignored",
        (("causal[None, None] & mask[:, None, None, :].bool()", "causal[None, None]"),),
        names=("padding mask ignored",),
    ),
    "qwen_gate_up": Plant(
        "qwen2",
        "activation on up instead of gate",
        (("F.silu(self.gate(x)) * self.up(x)", "F.silu(self.up(x)) * self.gate(x)"),),
        names=("gate and up swapped",),
        says="F.silu(self.gate(x)) * self.up(x)",
    ),
    "qwen_mlp_of_x": Plant(
        "qwen2",
        "mlp norm reads x, parallel",
        (("return h + self.mlp(self.norm2(h))", "return h + self.mlp(self.norm2(x))"),),
        names=("branches side by side",),
        says="return h + self.mlp(self.norm2(h))",
    ),
    "gemma_plain_norm": Plant(
        "gemma2",
        "norm weight without 1+",
        (("normed * (1 + self.weight)", "normed * self.weight"),),
        names=("norm gain without 1 added",),
    ),
    "gemma_scale": Plant(
        "gemma2",
        "scores scaled by head size not query_pre_attn_scalar",
        (('self.scale = c["query_pre_attn_scalar"] ** -0.5', "self.scale = self.size**-0.5"),),
        names=("attention scaled by another factor",),
        says="0.25 is expected",
    ),
    "gemma_no_cap": Plant(
        "gemma2",
        "no softcap of the scores",
        (("        scores = self.cap * torch.tanh(scores / self.cap)\n", ""),),
        names=("soft cap of scores missing",),
    ),
    "gemma_cap_late": Plant(
        "gemma2",
        "softcap after the mask",
        (
            ("        scores = self.cap * torch.tanh(scores / self.cap)\n", ""),
            (
                "torch.finfo(scores.dtype).min)\n",
                "torch.finfo(scores.dtype).min)\n        scores = self.cap * torch.tanh(scores / self.cap)\n",
            ),
        ),
        names=("soft cap behind the mask",),
    ),
    "gemma_window_layers": Plant(
        "gemma2",
        "window in the odd layers, not the even",
        (("i % 2 == 0 else", "i % 2 == 1 else"),),
        names=("local windows in the wrong layers",),
    ),
    "gemma_window_one": Plant(
        "gemma2",
        "window one token too wide",
        (("back < self.window", "back <= self.window"),),
        names=("local window of another width",),
        says="back < self.window",
    ),
    "gemma_table_kv": Plant(
        "gemma2",
        "TABLE: key and value swapped in the fused kv",
        (),
        (("{p:k,v}_proj.weight [o e]", "{p:v,k}_proj.weight [o e]"),),
        names=("key and value swapped",),
        says="{p:v,k} should be {p:k,v}",
    ),
    "gemma_table_gate": Plant(
        "gemma2",
        "TABLE: gate/up interleaved where halves are read",
        (),
        (("wi.weight [(p f) e]", "wi.weight [(f p) e]"),),
        names=("layout in the table",),
        says="[(f p) e] should be [(p f) e]",
    ),
    "gemma_norm_sum": Plant(
        "gemma2",
        "post norm after the sum, not on the branch",
        (("x = x + self.n2(self.attn(self.n1(x), keep))", "x = self.n2(x + self.attn(self.n1(x), keep))"),),
        names=("norm of the sum for that of the branch",),
    ),
    "albert_last_token": Plant(
        "albert",
        "pooled from the last token",
        (("x[:, 0]", "x[:, -1]"),),
        names=("pooled from the wrong place",),
        says="x[:, 0]",
    ),
    "albert_mask_after": Plant(
        "albert",
        "mask multiplied after softmax",
        (
            ("        scores = scores + (1.0 - keep[:, None, None, :].to(x.dtype)) * -1e9\n", ""),
            ("probs = scores.softmax(dim=-1)", "probs = scores.softmax(dim=-1) * keep[:, None, None, :]"),
        ),
        names=("padding mask after the softmax",),
    ),
    "albert_table_qk": Plant(
        "albert",
        "TABLE: query and key swapped in the fused qkv",
        (),
        (
            ("attention.{p:query,key,value}.weight", "attention.{p:key,query,value}.weight"),
            ("attention.{p:query,key,value}.bias", "attention.{p:key,query,value}.bias"),
        ),
        names=("query and key swapped",),
        says="{p:key,query,value} should be {p:query,key,value}",
    ),
    "albert_fewer": Plant(
        "albert",
        "one layer too few",
        (("for _ in range(self.depth):", "for _ in range(self.depth - 1):"),),
        names=("wrong tensor",),
        says="range(self.depth)",
    ),
    "t5_dec_buckets": Plant(
        "t5",
        "decoder uses bidirectional buckets",
        (("both=not self.cross", "both=True"),),
        names=("other rows looked up",),
        says="both directions, as in an encoder",
    ),
    "t5_bias_first": Plant(
        "t5",
        "position bias only in the first layer",
        (
            (
                "            x = layer(x, bias, memory, hidden)\n",
                "            x = layer(x, bias, memory, hidden)\n            bias = mask\n",
            ),
        ),
        names=("relative position bias missing",),
    ),
    "t5_memory_raw": Plant(
        "t5",
        "cross-attention reads the encoder without its final norm",
        (("return self.norm(x)", "return self.norm(x) if self.cross else x"),),
        names=("norm missing in a layer",),
    ),
    "t5_sign": Plant(
        "t5",
        "relative position with the other sign",
        (
            (
                "torch.arange(k)[None, :] - torch.arange(q)[:, None]",
                "torch.arange(q)[:, None] - torch.arange(k)[None, :]",
            ),
        ),
        names=("relative position bias of the other sign",),
        says="torch.arange(k)[None, :] - torch.arange(q)[:, None]",
    ),
    "whisper_dropout": Plant(
        "whisper",
        "dropout active in eval",
        (("x = x + self.positional_embedding\n", "x = F.dropout(x + self.positional_embedding, 0.1)\n"),),
        names=("dropout active",),
        says="x = x + self.positional_embedding",
    ),
    "gpt2_table_heads": Plant(
        "gpt2",
        "TABLE: fused qkv laid out (h p d), is (p h d)",
        (),
        (
            ("[e (p h d)]", "[e (h p d)]"),
            ("c_attn.bias [(p h d)]", "c_attn.bias [(h p d)]"),
        ),
        names=("query, key and value interleaved wrongly",),
        says="[e (h p d)] should be [e (p h d)]",
    ),
    "gpt2_table_square": Plant(
        "gpt2",
        "TABLE: o_proj not transposed",
        (),
        (("blocks.{i}.attn.o_proj.weight [f e]", "blocks.{i}.attn.o_proj.weight [e f]"),),
        names=("square weight transposed",),
        says="[e f] should be [f e]",
    ),
    "opt_no_offset2": Plant(
        "opt",
        "positions not offset by 2",
        (("self.pos(places + 2)", "self.pos(places.clamp(min=0))"),),
        names=("position offset",),
        says="off by -2",
    ),
    "albert_eye": Plant(
        "albert",
        "every token sees itself, though hidden",
        (
            (
                "scores = scores + (1.0 - keep[:, None, None, :].to(x.dtype)) * -1e9",
                "scores = scores + (1.0 - torch.maximum(keep[:, None, :].to(x.dtype), torch.eye(s, dtype=x.dtype))[:, None]) * -1e9",
            ),
        ),
        names=("hidden tokens see themselves",),
    ),
    "albert_not_itself": Plant(
        "albert",
        "no token sees itself",
        (
            (
                "scores = scores + (1.0 - keep[:, None, None, :].to(x.dtype)) * -1e9",
                "scores = scores + (1.0 - keep[:, None, None, :].to(x.dtype)) * -1e9 - 1e9 * torch.eye(s, dtype=x.dtype)",
            ),
        ),
        names=(
            "a step too many",
            "tokens do not see themselves",
        ),
    ),
}

TABLES = {
    "fused_phd_hpd": Plant(
        "neox",
        "TABLE: qkv given by parts where the module reads by heads",
        (),
        (
            (
                '"gpt_neox.layers.{i}.attention.query_key_value.{w:weight,bias}" = "blocks.{i}.attn.qkv.{w:weight,bias}"',
                '"gpt_neox.layers.{i}.attention.query_key_value.weight [(h p d) e]" = "blocks.{i}.attn.qkv.weight [(p h d) e]"\n"gpt_neox.layers.{i}.attention.query_key_value.bias [(h p d)]" = "blocks.{i}.attn.qkv.bias [(p h d)]"',
            ),
            ("[inputs]", "[sizes]\nh = 4\np = 3\n[inputs]"),
        ),
        names=("layout in the table",),
        says="[(h p d) e] should be [(p h d) e]",
    ),
    "weights_only": Plant(
        "neox",
        "TABLE: only the weight's line is wrong",
        (),
        (
            (
                '"gpt_neox.layers.{i}.attention.query_key_value.{w:weight,bias}" = "blocks.{i}.attn.qkv.{w:weight,bias}"',
                '"gpt_neox.layers.{i}.attention.query_key_value.weight [(h p d) e]" = "blocks.{i}.attn.qkv.weight [(p h d) e]"\n"gpt_neox.layers.{i}.attention.query_key_value.bias" = "blocks.{i}.attn.qkv.bias"',
            ),
            ("[inputs]", "[sizes]\nh = 4\np = 3\n[inputs]"),
        ),
        names=("layout in the table",),
        says="[(h p d) e] should be [(p h d) e]",
    ),
    "square_plain": Plant(
        "opt",
        "CODE/TABLE: square weight not transposed",
        (
            (
                "return self.o(y.transpose(1, 2).flatten(2))",
                "return y.transpose(1, 2).flatten(2) @ self.o.weight + self.o.bias",
            ),
        ),
        names=("square weight transposed",),
    ),
    "norms_swapped": Plant(
        "gpt2",
        "TABLE: ln_1 and ln_2 exchanged",
        (),
        (
            (
                'ln_{n:1,2}.{w:weight,bias}" = "blocks.{i}.norm{n:1,2}',
                'ln_{n:1,2}.{w:weight,bias}" = "blocks.{i}.norm{n:2,1}',
            ),
        ),
        names=("tensors exchanged in the table",),
        says="ln_{n:2,1}",
    ),
    "gate_up_lines": Plant(
        "qwen2",
        "TABLE: gate and up exchanged",
        (),
        (
            (
                'mlp.{p:gate,up,down}_proj.weight" = "layers.{i}.mlp.{p:gate,up,down}',
                'mlp.{p:gate,up,down}_proj.weight" = "layers.{i}.mlp.{p:up,gate,down}',
            ),
        ),
        names=("gate and up swapped",),
        says="{p:up,gate,down}_proj",
    ),
    "q_k_two_lines": Plant(
        "opt",
        "TABLE: q and k exchanged in two lines",
        (),
        (
            (
                '"model.decoder.layers.{i}.self_attn.{p:q_proj,k_proj,v_proj,out_proj}.{w:weight,bias}" = "layers.{i}.attn.{p:q,k,v,o}.{w:weight,bias}"',
                '"model.decoder.layers.{i}.self_attn.q_proj.{w:weight,bias}" = "layers.{i}.attn.k.{w:weight,bias}"\n"model.decoder.layers.{i}.self_attn.k_proj.{w:weight,bias}" = "layers.{i}.attn.q.{w:weight,bias}"\n"model.decoder.layers.{i}.self_attn.{p:v_proj,out_proj}.{w:weight,bias}" = "layers.{i}.attn.{p:v,o}.{w:weight,bias}"',
            ),
        ),
        names=("query and key swapped",),
        says="self_attn.k_proj",
    ),
    "kv_parts_by_heads": Plant(
        "gemma2",
        "TABLE: kv by heads where parts are read",
        (),
        (
            (
                '{p:k,v}_proj.weight [o e]" = "layers.{i}.attn.kv.weight [(p o) e]',
                '{p:k,v}_proj.weight [(h d) e]" = "layers.{i}.attn.kv.weight [(h p d) e]',
            ),
            ("[inputs]", "[sizes]\nh = 2\n[inputs]"),
        ),
        names=("layout in the table",),
        says="[(h p d) e] should be [(p h d) e]",
    ),
    "concat_swapped": Plant(
        "gemma2",
        "TABLE: up before gate",
        (),
        (("mlp.{p:gate,up}_proj", "mlp.{p:up,gate}_proj"),),
        names=("gate and up swapped",),
        says="{p:up,gate} should be {p:gate,up}",
    ),
}

TWENTY = {
    "neox_scale_heads": Plant(
        "neox",
        "scores divided by sqrt(number of heads)",
        (("/ self.size**0.5", "/ self.heads**0.5"),),
        names=("attention scaled by another factor",),
        says="/ self.size**0.5`",
    ),
    "neox_rope_dim": Plant(
        "neox",
        "frequencies over the head size, not over the rotated part",
        (("device=x.device).float() / self.rot)", "device=x.device).float() / self.size)"),),
        names=("rotary theta",),
        says="/ self.rot)`",
    ),
    "neox_tied": Plant(
        "neox",
        "head tied to the embedding, though the checkpoint has its own",
        (("return self.head(self.norm(x))", "return self.norm(x) @ self.tok.weight.T"),),
        names=("another function",),
        says="@ self.head.weight.T",
    ),
    "opt_fc2_bias": Plant(
        "opt",
        "fc2 without its bias",
        (("return x + self.fc2(h)", "return x + F.linear(h, self.fc2.weight)"),),
        names=("linear layer bias missing",),
    ),
    "qwen_k_not_rotated": Plant(
        "qwen2",
        "keys are not rotated",
        (("rotate(q, cos, sin), rotate(k, cos, sin)", "rotate(q, cos, sin), k"),),
        names=("rotary missing",),
        says="of the keys alone",
    ),
    "qwen_eps_outside": Plant(
        "qwen2",
        "eps outside of the root",
        (
            (
                "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight",
                "x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight",
            ),
        ),
        names=("RMSNorm eps outside of the root",),
    ),
    "qwen_heads_back": Plant(
        "qwen2",
        "heads not transposed back",
        (('"bhqk,bhkd->bqhd"', '"bhqk,bhkd->bhqd"'),),
        names=("heads not transposed back",),
    ),
    "gemma_table_norms": Plant(
        "gemma2",
        "TABLE: post_attention and pre_feedforward norms exchanged",
        (),
        (("{n:n1,n2,n3,n4}", "{n:n1,n3,n2,n4}"),),
        names=("tensors exchanged in the table",),
        says="{n:input,pre_feedforward,post_attention,post_feedforward}",
    ),
    "albert_types": Plant(
        "albert",
        "token types ignored",
        (("self.kind(kinds)", "self.kind(torch.zeros_like(kinds))"),),
        names=("token types ignored",),
        says="self.kind(kinds))`",
    ),
    "albert_table_square": Plant(
        "albert",
        "TABLE: the output projection transposed",
        (),
        (
            (
                '.attention.dense.{w:weight,bias}" = "layer.out.{w:weight,bias}"',
                '.attention.dense.weight [e f]" = "layer.out.weight [f e]"\n"albert.encoder.albert_layer_groups.0.albert_layers.0.attention.dense.bias" = "layer.out.bias"',
            ),
        ),
        names=("square weight transposed",),
        says="[f e] should be [e f]",
    ),
    "albert_not_itself2": Plant(
        "albert",
        "no token sees itself",
        (
            (
                "probs = scores.softmax(dim=-1)",
                "scores = scores.masked_fill(torch.eye(s, dtype=torch.bool), -1e9)\n        probs = scores.softmax(dim=-1)",
            ),
        ),
        names=("a step too many",),
        says="write `scores = scores`",
    ),
    "t5_far": Plant(
        "t5",
        "max distance of the buckets is 128, not the config's 16",
        (('c["relative_attention_max_distance"]', "128"),),
        names=("other rows looked up",),
        says="6 where the reference has 7, for a distance of 6",
    ),
    "t5_cross_mask": Plant(
        "t5",
        "cross-attention sees the encoder's padding",
        (
            (
                "x = self.decoder(self.tok(target), future, memory, padding)",
                "x = self.decoder(self.tok(target), future, memory, 0.0)",
            ),
        ),
        names=("padding mask ignored",),
    ),
    "t5_shifted": Plant(
        "t5",
        "decoder's input shifted by one once more",
        (("self.decoder(self.tok(target), future", "self.decoder(self.tok(target.roll(1, dims=1)), future"),),
        names=(
            "another expression",
            "other rows looked up",
        ),
        says="self.tok(target",
    ),
    "whisper_conv_gelu": Plant(
        "whisper",
        "no GELU after the second convolution",
        (("x = F.gelu(self.conv2(x))", "x = self.conv2(x)"),),
        names=("activation missing",),
    ),
    "whisper_heads": Plant(
        "whisper",
        "heads not transposed back",
        (("(w @ v).permute(0, 2, 1, 3).flatten(start_dim=2)", "(w @ v).reshape(b, s, e)"),),
        names=("heads not transposed back",),
    ),
    "gpt2_positions": Plant(
        "gpt2",
        "positions begin at 1",
        (("self.pos(torch.arange(s, device=ids.device))", "self.pos(torch.arange(1, s + 1, device=ids.device))"),),
        names=("position offset",),
        says="off by +1",
    ),
    "gpt2_table_dh": Plant(
        "gpt2",
        "TABLE: heads and channels exchanged in qkv",
        (),
        (
            ("[e (p h d)]", "[e (p d h)]"),
            ("c_attn.bias [(p h d)]", "c_attn.bias [(p d h)]"),
        ),
        names=("heads split wrongly",),
        says="[e (p d h)] should be [e (p h d)]",
    ),
    "gpt2_res_norm2": Plant(
        "gpt2",
        "second residual taken after the norm",
        (
            (
                'return x + self.proj(F.gelu(self.fc(self.norm2(x)), approximate="tanh"))',
                'x = self.norm2(x)\n        return x + self.proj(F.gelu(self.fc(x), approximate="tanh"))',
            ),
        ),
        names=("residual taken after the norm",),
    ),
    "albert_not_itself3": Plant(
        "albert",
        "no token sees itself",
        (
            (
                "scores = scores + (1.0 - keep[:, None, None, :].to(x.dtype)) * -1e9",
                "scores = scores.masked_fill(~(keep[:, None, None, :].bool() & ~torch.eye(s, dtype=torch.bool)), -1e9)",
            ),
        ),
        names=("tokens do not see themselves",),
    ),
}
