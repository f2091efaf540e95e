"""Verify that a server, folder, file or object gives a model's vectors, by the model's stored
reference vectors (proof).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rayembed.proof.proof import NumberType, Proof
    from rayembed_extras.verification.diagnose import Diagnosis


def verify(
    target: Any,
    proof: "Proof | str | Path | None" = None,
    *,
    prompts: str | None = None,
    repeat: int = 2,
    within: "NumberType" = "bfloat16",
    dimensions: int | None = None,
    **server: Any,
) -> "Diagnosis":
    """Compare the vectors of a target with a model's proof (its stored reference vectors).

    Args:
        target: address of a server, model folder, GGUF or ONNX file, registered version
            (`models:/name@alias`), LangChain `Embeddings`, `SentenceTransformer`, or a function
            from a list of texts to vectors.
        proof: the model, by folder or reference, or its proof; None: the target is a folder or a
            registered version with a proof of its own.
        prompts: `client` sends prompts as literal text, `server` leaves them to the target; None:
            by the kind of target, which the verdict's notes say.
        repeat: times that each text is embedded, alone and in batches.
        within: number type of the target, which sets the allowed cosines; `int8` is to be stated,
            since slightly other weights turn vectors as far as its rounding.
        dimensions: of the target's vectors, if it cuts them as Matryoshka models allow; None: all.
        server: `schema`, `model`, `key` and `encoding` of an address, see `servers.open_server`.

    Raises:
        RayembedError: there is no proof, or the target is away or gives no vectors.
    """
    from rayembed_extras.verification.targets import verify_target

    options: dict[str, Any] = {"prompts": prompts, "repeat": repeat, "within": within}
    return verify_target(target, proof, dimensions=dimensions, **options, **server)
