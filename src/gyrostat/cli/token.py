"""`gyrostat token`: who may come into a cluster that others can reach."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gyrostat.cli.cluster_options import AsJson, console, print_json
from gyrostat.cluster.api.tokens import Principal, new_token, read_tokens, write_tokens
from gyrostat.cluster.records import NAMES
from gyrostat.core.errors import UsageError

_HELP = "\n\n".join(
    [
        "Tokens for a cluster that can be reached from other machines: `gyrostat up --listen 0.0.0.0:7460 --tokens FILE`.",
        "  gyrostat token add alice --root /srv/alice     (prints her token, once)",
        "  gyrostat token add ops --operator",
        "  gyrostat token list",
        "  gyrostat token revoke alice                    (at once, also where the cluster runs)",
        "A tenant sees and touches its own jobs only, and runs scripts below its root. The file keeps hashes only.",
    ]
)
app = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="rich")
File = Annotated[
    Path, typer.Option("--file", metavar="FILE", help="The token file that the cluster was given.")
]
_FILE = Path("tokens.json")


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="token", short_help="Say who may come into the cluster.")


@app.command("add", short_help="Make a token for a tenant or an operator.")
def add(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", show_default=False, help="Whose it is.")],
    operator: Annotated[bool, typer.Option("--operator", help="May see and do everything.")] = False,
    root: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Its scripts and working directories lie below; a must for tenants.",
        ),
    ] = None,
    vc: Annotated[
        list[str] | None,
        typer.Option(
            "--vc",
            metavar="VC",
            show_default="the one of its name",
            help="May submit there. May be repeated.",
        ),
    ] = None,
    file: File = _FILE,
    as_json: AsJson = False,
) -> None:
    """Make a token. It is shown this once; the file keeps only its hash."""
    if not NAMES.fullmatch(tenant):
        raise UsageError(
            f"a tenant's name is made of up to 64 letters, digits, dots, dashes and underscores; got {tenant!r}"
        )
    if operator and (root is not None or vc):
        raise UsageError("an operator may do everything: leave out --root and --vc, or --operator")
    if not operator and root is None:
        raise UsageError(f"where may {tenant}'s scripts lie? --root DIR, such as --root /srv/{tenant}")
    if root is not None and not root.is_dir():
        raise UsageError(f"there is no directory {root} for {tenant}'s scripts")
    principal = Principal(
        tenant=tenant,
        operator=operator,
        root=None if root is None else str(root.resolve()),
        vcs=None if operator else tuple(vc or (tenant,)),
    )
    secret, token = new_token(principal)
    write_tokens(file, (*(read_tokens(file) if file.exists() else ()), token))
    if as_json:
        print_json({"token": secret, "id": token.id, "principal": principal})
    else:
        print(secret)


@app.command("list", short_help="Whose tokens there are.")
def list_(file: File = _FILE, as_json: AsJson = False) -> None:
    """Whose tokens there are; not the tokens themselves, which nobody knows but their owners."""
    tokens = read_tokens(file)
    if as_json:
        print_json([{"id": token.id, "principal": token.principal} for token in tokens])
        return
    rows = Table("id", "tenant", "may", box=None)
    for token in tokens:
        who = token.principal
        may = "do everything" if who.operator else f"submit to {', '.join(who.vcs or ())}, below {who.root}"
        rows.add_row(token.id, who.tenant, may)
    console().print(rows)


@app.command("revoke", short_help="Let a token open nothing any more.")
def revoke(
    which: Annotated[
        str,
        typer.Argument(metavar="TENANT|ID", show_default=False, help="All of a tenant, or one by its id."),
    ],
    file: File = _FILE,
    as_json: AsJson = False,
) -> None:
    """Let a tenant's tokens, or one token, open nothing any more. A running cluster notices at once."""
    tokens = read_tokens(file)
    kept = tuple(token for token in tokens if which not in (token.id, token.principal.tenant))
    if len(kept) == len(tokens):
        known = ", ".join(sorted({token.principal.tenant for token in tokens})) or "nobody's"
        raise UsageError(f"there is no token of {which!r} in {file}; there are {known}")
    write_tokens(file, kept)
    if as_json:
        print_json({"revoked": len(tokens) - len(kept)})
    else:
        print(f"{len(tokens) - len(kept)} revoked, {len(kept)} left")
