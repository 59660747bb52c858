"""Messages of a router that opens ports by UPnP: its description, and its answers."""

from __future__ import annotations

import re

OUTSIDE = "203.0.113.5"
"""The address that the router gives as its own."""
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DEVICE = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor></specVersion>
<device><deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType>
<friendlyName>home</friendlyName><manufacturer>m</manufacturer><modelName>m</modelName><UDN>uuid:1</UDN>
<serviceList><service><serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<SCPDURL>/scpd.xml</SCPDURL><controlURL>CONTROL</controlURL><eventSubURL>/event</eventSubURL></service></serviceList>
</device></root>"""
ARGUMENTS = {
    "GetExternalIPAddress": [("NewExternalIPAddress", "out", "string")],
    "AddPortMapping": [
        ("NewRemoteHost", "in", "string"),
        ("NewExternalPort", "in", "ui2"),
        ("NewProtocol", "in", "string"),
        ("NewInternalPort", "in", "ui2"),
        ("NewInternalClient", "in", "string"),
        ("NewEnabled", "in", "boolean"),
        ("NewPortMappingDescription", "in", "string"),
        ("NewLeaseDuration", "in", "ui4"),
    ],
    "DeletePortMapping": [
        ("NewRemoteHost", "in", "string"),
        ("NewExternalPort", "in", "ui2"),
        ("NewProtocol", "in", "string"),
    ],
}


def described_service() -> str:
    """Return the service's description of its actions."""
    actions, variables = "", ""
    for action, arguments in ARGUMENTS.items():
        listed = "".join(
            f"<argument><name>{name}</name><direction>{way}</direction>"
            f"<relatedStateVariable>{action}{name}</relatedStateVariable></argument>"
            for name, way, _ in arguments
        )
        actions += f"<action><name>{action}</name><argumentList>{listed}</argumentList></action>"
        variables += "".join(
            f'<stateVariable sendEvents="no"><name>{action}{name}</name><dataType>{kind}</dataType></stateVariable>'
            for name, _, kind in arguments
        )
    return (
        '<?xml version="1.0"?><scpd xmlns="urn:schemas-upnp-org:service-1-0"><specVersion><major>1</major>'
        f"<minor>0</minor></specVersion><actionList>{actions}</actionList>"
        f"<serviceStateTable>{variables}</serviceStateTable></scpd>"
    )


class Gateway:
    """A router that opens ports by UPnP.

    Args:
        external_host: the address that the router gives as its own
        taken: ports that belong to another machine
        only_for_good: refuse leases with an end
    """

    def __init__(self, external_host: str = OUTSIDE, taken: tuple[int, ...] = (), only_for_good: bool = False):
        self.external_host, self.taken, self.only_for_good = external_host, taken, only_for_good
        self.opened: dict[int, tuple[str, int, int]] = {}
        self.control = "/control"

    def answer(self, path: str, request: str) -> tuple[int, str]:
        """Return status and body of the answer."""
        if path == "/root.xml":
            return 200, DEVICE.replace("CONTROL", self.control)
        if path == "/scpd.xml":
            return 200, described_service()
        action = re.search(r"SOAPAction: .*#(\w+)", request, re.IGNORECASE)[1]
        given = dict(re.findall(r"<(New\w+)>([^<]*)</New", request))
        return self.act(action, given)

    def act(self, action: str, given: dict[str, str]) -> tuple[int, str]:
        result = ""
        if action == "GetExternalIPAddress":
            result = f"<NewExternalIPAddress>{self.external_host}</NewExternalIPAddress>"
        elif action == "DeletePortMapping":
            if self.opened.pop(int(given["NewExternalPort"]), None) is None:
                return 500, fault(714)
        elif self.only_for_good and int(given["NewLeaseDuration"]):
            return 500, fault(725)
        elif int(given["NewExternalPort"]) in self.taken:
            return 500, fault(718)
        else:
            lease = given["NewInternalClient"], int(given["NewInternalPort"]), int(given["NewLeaseDuration"])
            self.opened[int(given["NewExternalPort"])] = lease
        return 200, envelope(f'<u:{action}Response xmlns:u="{SERVICE}">{result}</u:{action}Response>')


def envelope(inside: str) -> str:
    return f'<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>{inside}</s:Body></s:Envelope>'


def fault(code: int) -> str:
    return envelope(
        "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
        f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode>'
        "<errorDescription>no</errorDescription></UPnPError></detail></s:Fault>"
    )
