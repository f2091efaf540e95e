"""Run the verification job, from its command-line arguments to a verdict and an exit code."""

import argparse
import json
import os

from rayembed.pipeline.job import Job, JobContext, Option, at_least, option

DIFFERS = 3
"""Exit code where the target gives other vectors than the model."""


OWN_KEY = "RAYEMBED_API_KEY"
"""Environment variable with the token of `rayembed serve`."""


def _is_here(target: str) -> bool:
    """Whether the target is a server on this machine."""
    if not target.startswith(("http://", "https://")):
        return False
    from rayembed_extras.verification.servers import is_loopback

    return is_loopback(target)


def _verify(args: argparse.Namespace, context: JobContext) -> int:
    # torch, unless the target is an address.
    from rayembed_extras.verification.targets import verify_target

    server = {
        "schema": args.schema,
        "model": args.model_name,
        "encoding": args.encoding,
        "key": os.environ.get(args.api_key_env or OWN_KEY, "").strip() or None,
    }
    # Of servers elsewhere nobody knows that they may see the token of one's own.
    if args.api_key_env is None and not _is_here(args.target):
        server.pop("key")
    verdict = verify_target(
        args.target,
        args.proof,
        prompts=args.prompts,
        repeat=args.repeat,
        within=args.within,
        dimensions=args.dimensions,
        tracking_uri=args.tracking_uri,
        **{name: value for name, value in server.items() if value is not None},
    )
    if args.json:
        context.out.write(json.dumps(verdict.as_json(), indent=1, ensure_ascii=False) + "\n")
    else:
        context.out.write(f"{verdict.line}\n")
        context.out.writelines(f"change: {advice}\n" for advice in verdict.advice)
        context.err.writelines(f"{note}\n" for note in verdict.notes)
    return 0 if verdict.same else DIFFERS


run_verify_job = Job(
    options=(
        Option(
            "target",
            {
                "metavar": "TARGET",
                "help": "address of a server (http://host:8000), model folder, .gguf or "
                ".onnx file, or models:/name@alias",
            },
        ),
        option(
            "--proof MODEL",
            "the model that TARGET should be: a folder, models:/name@alias, "
            "hf://org/name@revision, …; default: TARGET's own proof",
        ),
        option(
            "--schema {openai,tei,cohere}",
            "request and answer of the server; default: the first that answers",
        ),
        option(
            "--prompts {client,server}",
            "who puts the prompt before a text: this command, as part of the text, or the server; "
            "default: by schema, and said",
        ),
        option(
            "--model-name NAME", "name of the model in requests; default: the server's only one"
        ),
        option("--encoding {float,base64}", "encoding_format in OpenAI's schema"),
        option(
            "--api-key-env NAME",
            f"environment variable with the server's token; default: {OWN_KEY}, for servers on "
            "this machine only",
        ),
        option(
            "--within {float32,bfloat16,int8}",
            "number type of the server, which sets the allowed cosines; int8 where it rounds "
            "vectors or weights to it",
            default="bfloat16",
        ),
        option(
            "--dimensions N",
            "numbers of the target's vectors, if it cuts them (Matryoshka); servers are asked for "
            "so many; default: all of the model",
            type=at_least(1),
        ),
        option(
            "--repeat N",
            "times that each text is embedded, alone and in batches",
            type=at_least(1),
            default=2,
        ),
        option("--json", "print the verdict and its figures as JSON"),
        option(
            "--tracking-uri URI",
            "MLflow's address for models:/…; default: the SQLite file in outputs/",
        ),
    ),
    read=lambda args: args,
    run=_verify,
    stopped="stopped; nothing was verified",
)
"""The job that verifies a target by a model's proof."""
